//! A continuous-batching loop over the ledger: admission, prefill, decode with overlap, retraction when pages run out.
//!
//! The device is fake. Steps queue up on it, and when the loop waits for one, the device draws how many tokens each
//! lane accepts. While it works on a round, the next one is prepared and launched (`overlap_depth` 1).
//! `examples/scheduler.py` is the same in Python and prints the same.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::collections::VecDeque;

use specpool_core::{Error, Group, Layout, Ledger, LedgerConfig, Result, Row, Shape};

const NUM_REQUESTS: usize = 40;
const SHAPE: i32 = 1; // the tree's index in the ledger's list; 0 is "no drafting"

struct Request {
    /// Tokens to prefill: the prompt and, after a retraction, what was generated.
    len: i32,
    /// Tokens at which it is done.
    end: i32,
    row: Row,
}

struct Scheduler {
    ledger: Ledger,
    waiting: VecDeque<Request>,
    /// In the order of their admission.
    running: Vec<Request>,
    /// After a retraction no request is admitted until one is done.
    is_crowded: bool,
    /// Steps that are launched and not waited for, oldest first: the step, and the lanes of its decode (0 for a
    /// prefill).
    on_device: VecDeque<(u64, usize)>,
    seed: u64,
    num_rounds: u32,
    num_retractions: u32,
}

impl Scheduler {
    /// A number in `1..=most`, from a linear congruential generator.
    fn draw(&mut self, most: u64) -> i32 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        1 + ((self.seed >> 33) % most) as i32
    }

    /// Admits requests from the front of the queue while there are pages for the prompt and its first round, with one
    /// prefill for all of them.
    fn admit(&mut self) -> Result<()> {
        let (mut rows, mut lens, mut free) = (Vec::new(), Vec::new(), self.ledger.free_pages(0)? as i64);
        while let Some(len) = self.waiting.front().map(|request| request.len) {
            free -= self.ledger.pages_needed(len, len, SHAPE)?[0];
            if self.is_crowded || free < 0 || self.ledger.num_free_rows() == 0 {
                break;
            }
            let row = self.ledger.admit(None)?;
            rows.push(row.0);
            lens.push(len);
            self.running.extend(self.waiting.pop_front().map(|request| Request { row, ..request }));
        }
        if !rows.is_empty() {
            let plan = self.ledger.prepare_extend(&rows, &lens, true)?;
            self.launch(plan.step, 0)?;
        }
        Ok(())
    }

    /// Runs one round of all running requests. If pages run out, first waits for what is in flight, then retracts.
    fn decode(&mut self) -> Result<()> {
        while !self.running.is_empty() {
            let rows: Vec<i32> = self.running.iter().map(|request| request.row.0).collect();
            match self.ledger.prepare_decode(&rows, &vec![SHAPE; rows.len()], true) {
                Ok(plan) => {
                    self.num_rounds += 1;
                    return self.launch(plan.step, rows.len());
                }
                Err(Error::OutOfPages { .. }) if !self.on_device.is_empty() => self.wait()?,
                Err(Error::OutOfPages { .. }) if rows.len() > 1 => self.retract_newest()?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// An engine enqueues page copies, the table delta and the forward between `launch` and `ack_delta`.
    fn launch(&mut self, step: u64, num_lanes: usize) -> Result<()> {
        self.ledger.launch(step)?;
        self.ledger.take_delta(step)?;
        self.on_device.push_back((step, num_lanes));
        self.ledger.ack_delta(step)
    }

    /// Waits for the oldest step on the device. A request that is done leaves, also while its next round is in flight.
    fn wait(&mut self) -> Result<()> {
        let Some((step, num_lanes)) = self.on_device.pop_front() else { return Ok(()) };
        if num_lanes > 0 {
            let most = self.ledger.shapes()[SHAPE as usize].max_accept_len().into();
            let accept_lens: Vec<i32> = (0..num_lanes).map(|_| self.draw(most)).collect();
            self.ledger.resolve(step, &accept_lens)?;
        }
        self.ledger.complete(step)?;
        for request in std::mem::take(&mut self.running) {
            if self.ledger.resolved_len()[request.row.at()] < request.end {
                self.running.push(request);
            } else {
                self.ledger.finish(request.row)?;
                self.is_crowded = false;
            }
        }
        Ok(())
    }

    /// Retracts the last admitted request. It comes back later with the tokens that it has.
    fn retract_newest(&mut self) -> Result<()> {
        let Some(request) = self.running.pop() else { return Ok(()) };
        let len = self.ledger.resolved_len()[request.row.at()];
        self.ledger.retract(request.row)?;
        self.waiting.push_front(Request { len, ..request });
        self.is_crowded = true;
        self.num_retractions += 1;
        Ok(())
    }

    /// Serves all requests, and returns the balance.
    fn serve(mut self) -> Result<String> {
        for _ in 0..NUM_REQUESTS {
            let len = self.draw(24);
            let end = len + 8 + self.draw(56);
            self.waiting.push_back(Request { len, end, row: Row(0) });
        }
        while !self.waiting.is_empty() || !self.running.is_empty() {
            self.admit()?;
            self.decode()?;
            while self.on_device.len() > 1 {
                self.wait()?;
            }
        }
        while !self.on_device.is_empty() {
            self.wait()?;
        }
        self.ledger.check()?;
        let Self { ledger, num_rounds, num_retractions, .. } = self;
        let (free, fenced, free_rows) = (ledger.free_pages(0)?, ledger.fenced_pages(0)?, ledger.num_free_rows());
        let (num_pages, num_rows) = (ledger.group_spec(0)?.num_pages, ledger.num_rows());
        Ok(format!(
            "{NUM_REQUESTS} requests done in {num_rounds} rounds, {num_retractions} retractions\n\
            {free} of {num_pages} pages free, {fenced} fenced, {free_rows} of {num_rows} rows free\n"
        ))
    }
}

/// Too few pages for eight rows.
pub(crate) fn run() -> Result<String> {
    let (hosts_drafts, layout) = (true, Layout::Dense);
    let group = Group { name: "kv".into(), page_size: 4, num_pages: 64, hosts_drafts, layout, window: None, sink: 0 };
    let mut config = LedgerConfig::new(vec![group], vec![Shape::eagle(3, 2, 6)?], 8, 128);
    config.overlap_depth = 1;
    let (ledger, waiting, running) = (Ledger::new(config)?, VecDeque::new(), Vec::new());
    let (is_crowded, on_device, seed, num_rounds, num_retractions) = (false, VecDeque::new(), 1, 0, 0);
    Scheduler { ledger, waiting, running, is_crowded, on_device, seed, num_rounds, num_retractions }.serve()
}

fn main() -> Result<()> {
    print!("{}", run()?);
    Ok(())
}
