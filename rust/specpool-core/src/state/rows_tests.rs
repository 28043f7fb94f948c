use super::*;

fn hash(rows: &Rows) -> u64 {
    let mut digest = Digest::new();
    rows.hash(&mut digest);
    digest.value()
}

#[test]
fn the_hash_sees_every_number_that_counts() {
    type Change = fn(&mut Rows);
    let changes: [Change; 16] = [
        |rows| rows.resolved[1] = 9,
        |rows| rows.in_flight[1] = 1,
        |rows| rows.hi[1] = 9,
        |rows| rows.drafted[1] = 9,
        |rows| rows.extend_from[1] = 9,
        |rows| rows.launched_rounds[1] = 9,
        |rows| rows.undrafted_rounds[1] = 9,
        |rows| rows.checkpoint[1] = 9,
        |rows| rows.live[1] = true,
        |rows| rows.ready[1] = true,
        |rows| rows.idle[1] = true,
        |rows| rows.epoch[1] = 9,
        |rows| rows.last_launched[1] = 9,
        |rows| rows.fresh = 2,
        |rows| rows.fenced = vec![(9, Row(1))],
        |rows| rows.fenced = vec![(9, Row(2))],
    ];
    let rows = Rows::new(2, 2).unwrap();
    let mut seen = vec![hash(&rows)];
    for change in changes {
        let mut rows = rows.clone();
        change(&mut rows);
        let hash = hash(&rows);
        assert!(!seen.contains(&hash), "change {} leaves no trace", seen.len());
        seen.push(hash);
    }
    let mut rows = rows.clone();
    rows.in_flight[1] = 1;
    rows.rounds[2] = 9;
    assert!(!seen.contains(&hash(&rows)), "a round's step leaves no trace");
}
