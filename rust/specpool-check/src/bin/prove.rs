//! `prove`: runs the enumerations and prints what they found, one line per case, then the total.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use specpool_check::cases;
use specpool_check::device::Plant;
use specpool_check::explore::{Broken, Case, Report, explore};

const USAGE: &str =
    "usage: prove [--quick] [--case TEXT] [--threads N] [--most STATES] [--whole] [--plant NAME] [--list]
  --quick    the cases of `make test` only
  --case     only the cases whose name has TEXT in it
  --threads  cases at a time (2)
  --most     states of a case that should end and does not (20000000)
  --whole    runs the cases that are cut to their last state, or until --most cuts them
  --plant    runs with a planted fault, which must be found: exit 0 when it is
  --list     the names of cases and plants";

struct Options {
    is_quick: bool,
    case: String,
    threads: usize,
    most: u64,
    is_whole: bool,
    plant: Option<Plant>,
    is_list: bool,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        is_quick: false,
        case: String::new(),
        threads: 2,
        most: 20_000_000,
        is_whole: false,
        plant: None,
        is_list: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text:?} is no number"));
        match arg.as_str() {
            "--quick" => options.is_quick = true,
            "--whole" => options.is_whole = true,
            "--list" => options.is_list = true,
            "--case" => options.case = value()?,
            "--threads" => options.threads = (number(value()?)? as usize).max(1),
            "--most" => options.most = number(value()?)?,
            "--plant" => {
                let name = value()?;
                options.plant = Some(Plant::named(&name).ok_or(format!("there is no plant {name:?}"))?);
            }
            _ => return Err(format!("unknown argument {arg:?}\n{USAGE}")),
        }
    }
    Ok(options)
}

fn print_broken(case: &Case, broken: &Broken) {
    println!("{}\n  BROKEN after {} states: {}", case.name, broken.states, broken.fault);
    println!("  configuration: {:?}", case.config);
    for event in &broken.trace {
        println!("    {event:?}");
    }
}

fn print_report(case: &Case, report: &Report) {
    println!(
        "{:66} {:>9} states {:>11} transitions {:>10} refusals {:>4} reserves {:>7.2} s{}",
        case.name,
        report.states,
        report.transitions,
        report.refusals,
        report.reserves,
        report.took.as_secs_f64(),
        if report.is_cut { " (cut)" } else { "" }
    );
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let mut cases = cases::all();
    cases.retain(|case| case.name.contains(&options.case) && (case.is_quick || !options.is_quick));
    if cases.is_empty() {
        eprintln!("no case has {:?} in its name{}", options.case, if options.is_quick { " and is quick" } else { "" });
        return ExitCode::from(2);
    }
    for case in cases.iter_mut().filter(|case| options.is_whole && case.limit.is_some()) {
        case.limit = Some(options.most);
    }
    if options.is_list {
        for case in &cases {
            println!("{}", case.name);
        }
        for (_, name, what) in Plant::ALL {
            println!("--plant {name:16} {what}");
        }
        return ExitCode::SUCCESS;
    }
    if cases.is_empty() {
        eprintln!("no case has {:?} in its name; --list names them", options.case);
        return ExitCode::from(2);
    }
    let started = Instant::now();
    let work = Mutex::new(cases.into_iter());
    let (total, broken) = (Mutex::new(Report::default()), Mutex::new(0_u64));
    let closed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..options.threads {
            scope.spawn(|| {
                loop {
                    let Some(case) = work.lock().ok().and_then(|mut work| work.next()) else { return };
                    match explore(&case, options.plant, options.most) {
                        Ok(report) => {
                            print_report(&case, &report);
                            let Ok(mut total) = total.lock() else { return };
                            total.states += report.states;
                            total.transitions += report.transitions;
                            total.refusals += report.refusals;
                            total.reserves += report.reserves;
                            closed.fetch_add(u64::from(!report.is_cut) * report.states, Ordering::Relaxed);
                        }
                        Err(found) => {
                            print_broken(&case, &found);
                            let Ok(mut broken) = broken.lock() else { return };
                            *broken += 1;
                        }
                    }
                }
            });
        }
    });
    let (total, broken) = (total.into_inner().unwrap_or_default(), broken.into_inner().unwrap_or(1));
    println!(
        "{} states, {} of them in cases run to their last state, {} transitions, {} refused calls, {} reserves reached \
         to their last slot or page, {:.0} s, {broken} broken",
        total.states,
        closed.into_inner(),
        total.transitions,
        total.refusals,
        total.reserves,
        started.elapsed().as_secs_f64()
    );
    let is_found = broken > 0;
    if is_found == options.plant.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
