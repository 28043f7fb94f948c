//! `soak`: runs random operations until a given number is done, or a law is broken.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use specpool_check::device::Plant;
use specpool_check::soak::{Episode, Failure, Tally, run};

const USAGE: &str = "usage: soak [--ops N] [--seed N] [--threads N] [--states] [--plant NAME]
  --ops      operations in all (1e8)
  --seed     decides every configuration and operation (1)
  --threads  episodes at a time (2)
  --states   every episode with recurrent states, in place of a quarter of them
  --plant    every episode with the device and a planted fault, which must be found: exit 0 when it is";

/// Operations of one episode. An episode with the device is slower and has an eighth of them.
const EPISODE_OPS: u64 = 65_536;

struct Options {
    ops: u64,
    seed: u64,
    threads: u64,
    is_stateful: bool,
    plant: Option<Plant>,
}

fn options() -> Result<Options, String> {
    let mut options = Options { ops: 100_000_000, seed: 1, threads: 2, is_stateful: false, plant: None };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if arg == "--states" {
            options.is_stateful = true;
            continue;
        }
        let value = args.next().ok_or(format!("{arg} needs a value\n{USAGE}"))?;
        let number = || match value.parse::<f64>() {
            Ok(number) if number >= 0.0 => Ok(number as u64),
            _ => Err(format!("{arg}: {value:?} is no count")),
        };
        match arg.as_str() {
            "--ops" => options.ops = number()?,
            "--seed" => options.seed = value.parse().map_err(|_| format!("--seed: {value:?} is no seed"))?,
            "--threads" => options.threads = number()?.max(1),
            "--plant" => {
                options.plant = Some(Plant::named(&value).ok_or(format!("there is no plant {value:?}"))?);
            }
            _ => return Err(format!("unknown argument {arg:?}\n{USAGE}")),
        }
    }
    Ok(options)
}

/// The episode of that number. One in eight has the device, one in four has recurrent states, one in sixteen both.
fn episode(options: &Options, number: u64) -> Episode {
    let has_device = options.plant.is_some() || number % 8 == 7;
    let has_states = options.is_stateful || matches!(number % 16, 1 | 5 | 9 | 15);
    let seed = options.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number;
    let ops = if has_device { EPISODE_OPS / 8 } else { EPISODE_OPS };
    Episode { seed, ops, has_device, has_states, plant: options.plant }
}

fn print_failure(number: u64, failure: &Failure) {
    println!("BROKEN in episode {number} after {} operations: {}", failure.found_after, failure.fault);
    println!("configuration: {:?}", failure.config);
    println!("shrunk to {} operations:", failure.trace.len());
    for op in &failure.trace {
        println!("  {op:?}");
    }
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    println!("seed {}", options.seed);
    let started = Instant::now();
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let (is_broken, total) = (AtomicBool::new(false), Mutex::new((Tally::default(), 0_u64)));
    std::thread::scope(|scope| {
        for _ in 0..options.threads {
            scope.spawn(|| {
                while done.load(Ordering::Relaxed) < options.ops && !is_broken.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let episode = episode(&options, number);
                    match run(&episode) {
                        Ok(tally) => {
                            done.fetch_add(tally.ops, Ordering::Relaxed);
                            let Ok(mut total) = total.lock() else { return };
                            total.0.ops += tally.ops;
                            total.0.refused += tally.refused;
                            total.0.forwards += tally.forwards;
                            total.0.hits += tally.hits;
                            total.0.evictions += tally.evictions;
                            total.0.folds += tally.folds;
                            total.1 += if episode.has_device { tally.ops } else { 0 };
                        }
                        Err(failure) => {
                            if !is_broken.swap(true, Ordering::Relaxed) {
                                print_failure(number, &failure);
                            }
                        }
                    }
                }
            });
        }
    });
    let (tally, with_device) = total.into_inner().unwrap_or_default();
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{} operations on {} configurations in {seconds:.0} s, {:.2} million a second; {} refused; {with_device} beside \
         the model and the device, which ran {} forwards; {} hits of the prefix index, {} evictions; {} states \
         written; seed {}",
        tally.ops,
        next.load(Ordering::Relaxed),
        tally.millions() / seconds,
        tally.refused,
        tally.forwards,
        tally.hits,
        tally.evictions,
        tally.folds,
        options.seed
    );
    let is_found = is_broken.load(Ordering::Relaxed);
    if is_found == options.plant.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
