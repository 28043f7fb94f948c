//! Runs the enumerations and prints what they found.

use specpool_check::{cases, explore};

fn main() {
    let mut total = 0;
    for case in cases::all() {
        match explore::explore(&case, None, std::env::args().nth(1).map_or(3_000_000, |s| s.parse().unwrap()), true) {
            Ok(report) => {
                total += report.states;
                eprintln!("{:60} {:?}", case.name, report);
            }
            Err(_) => {
                let broken = explore::explore(&case, None, 3_000_000, true).unwrap_err();
                eprintln!("{}: {}\n{:#?}", case.name, broken.fault, case.config);
                for event in &broken.trace {
                    eprintln!("  {event:?}");
                }
                std::process::exit(1);
            }
        }
    }
    eprintln!("{total}");
}
