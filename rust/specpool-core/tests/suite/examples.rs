//! Runs the examples and checks that their books balance.

#[path = "../../examples/scheduler.rs"]
#[allow(dead_code, reason = "its `main` is not called")]
mod scheduler;

#[test]
fn the_scheduler_serves_everybody_and_leaks_nothing() {
    let text = scheduler::run().unwrap();
    let numbers: Vec<u32> = text.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let [requests, rounds, retractions, free, pages, fenced, free_rows, rows] = numbers[..] else { panic!("{text}") };
    assert_eq!((free, fenced, free_rows), (pages, 0, rows));
    assert!(rounds > requests, "{text}");
    assert!(retractions > 0, "nothing was retracted, so nothing was shown: {text}");
}
