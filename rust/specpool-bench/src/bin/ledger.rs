//! `cargo bench`: every call that an engine makes for one decode step of a batch, on the core alone, without Python.
//!
//! `python -m benches ledger` measures the same through Python, beside plain Python.
#![allow(missing_docs, reason = "what criterion's macros make has none")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use specpool_core::{Group, Layout, Ledger, LedgerConfig, Shape};

/// A request ends at this many tokens, and another takes its place.
const END: i32 = 2048;

/// A batch whose requests come, grow and end.
struct Load {
    ledger: Ledger,
    rows: Vec<i32>,
    shapes: Vec<i32>,
    /// Accept lengths of 64 rounds.
    outcomes: Vec<Vec<i32>>,
    round: usize,
    seed: u64,
}

impl Load {
    fn new(page_size: i64, shape: Shape, batch: usize) -> Self {
        let num_pages = batch as i64 * 2 * i64::from(END) / page_size;
        let (hosts_drafts, layout) = (true, Layout::Dense);
        let group = Group { name: "kv".into(), page_size, num_pages, hosts_drafts, layout, window: None, sink: 0 };
        let config = LedgerConfig::new(vec![group], vec![shape], 2 * batch as i64, i64::from(END) + 16);
        let ledger = Ledger::new(config).unwrap();
        let mut load =
            Self { ledger, rows: vec![0; batch], shapes: vec![1; batch], outcomes: Vec::new(), round: 0, seed: 1 };
        let most = shape.max_accept_len() as i32;
        load.outcomes = (0..64).map(|_| (0..batch).map(|_| load.draw(1, most)).collect()).collect();
        load.admit(&(0..batch).collect::<Vec<_>>());
        for lane in (1..batch).rev() {
            let other = load.draw(0, lane as i32) as usize;
            load.rows.swap(lane, other); // rows of a real batch are not in order
        }
        load
    }

    /// A number in `least..=most`.
    fn draw(&mut self, least: i32, most: i32) -> i32 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        least + ((self.seed >> 33) % (most - least + 1) as u64) as i32
    }

    fn admit(&mut self, lanes: &[usize]) {
        for &lane in lanes {
            self.rows[lane] = self.ledger.admit(None).unwrap().0;
        }
        let rows: Vec<i32> = lanes.iter().map(|&lane| self.rows[lane]).collect();
        let lens: Vec<i32> = lanes.iter().map(|_| self.draw(64, 1023)).collect();
        let plan = self.ledger.prepare_extend(&rows, &lens, true).unwrap();
        self.ledger.launch(plan.step).unwrap();
        self.ledger.take_delta(plan.step).unwrap();
        self.ledger.ack_delta(plan.step).unwrap();
    }

    /// Runs one step and returns the time of its calls alone.
    fn step(&mut self) -> Duration {
        let accept_lens = &self.outcomes[self.round % self.outcomes.len()];
        self.round += 1;
        let start = Instant::now();
        black_box(self.ledger.tokens_required(&self.rows, &self.shapes).unwrap());
        let plan = self.ledger.prepare_decode(&self.rows, &self.shapes, true).unwrap();
        self.ledger.launch(plan.step).unwrap();
        black_box(self.ledger.take_delta(plan.step).unwrap());
        self.ledger.ack_delta(plan.step).unwrap();
        self.ledger.resolve(plan.step, accept_lens).unwrap();
        self.ledger.complete(plan.step).unwrap();
        drop(plan);
        start.elapsed()
    }

    /// Replaces the requests that have reached their end.
    fn refill(&mut self) {
        let is_over = |&lane: &usize| self.ledger.resolved_len()[self.rows[lane] as usize] >= END;
        let lanes: Vec<usize> = (0..self.rows.len()).filter(is_over).collect();
        if !lanes.is_empty() {
            for &lane in &lanes {
                self.ledger.finish(specpool_core::Row(self.rows[lane])).unwrap();
            }
            self.admit(&lanes);
        }
    }
}

fn steps(criterion: &mut Criterion) {
    let settings = [
        ("tree 5-8-64, P=64", 64, Shape::eagle(5, 8, 64).unwrap()),
        ("chain S=4, P=16", 16, Shape::eagle(4, 1, 5).unwrap()),
    ];
    for (name, page_size, shape) in settings {
        let mut group = criterion.benchmark_group(format!("step, {name}"));
        for batch in [1, 32, 256, 1024, 4096] {
            let mut load = Load::new(page_size, shape, batch);
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
                bencher.iter_custom(|count| {
                    let mut taken = Duration::ZERO;
                    for _ in 0..count {
                        taken += load.step();
                        load.refill();
                    }
                    taken
                });
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = steps
}
criterion_main!(benches);
