//! The enumeration: a worklist of worlds. Every event is applied to each world. States are told apart by the 128-bit
//! hash of their normal form. The enumeration ends when there is no new state.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use specpool_core::{Call, Geometry, Layout, LedgerConfig, PageNames, Reserve, StateGroup};

use crate::device::{Fault, Plant};
use crate::events::Alphabet;
use crate::progress::check_progress;
use crate::world::{Event, World};

/// One enumeration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Its name in reports.
    pub name: String,
    /// The configuration of the ledger.
    pub config: LedgerConfig,
    /// The events that can happen to it.
    pub alphabet: Alphabet,
    /// States after which it is cut short, nearest ones first; `None` runs it to its last state.
    pub limit: Option<u64>,
    /// Whether it belongs to the slice that every test run does.
    pub is_quick: bool,
    /// Whether every reserve and row width must be shown to be minimal: with the exact policy, and if all rounds can
    /// be reached.
    pub is_minimal: bool,
}

impl Case {
    /// The world that the enumeration starts from.
    ///
    /// # Errors
    /// As [`World::new`].
    pub fn world(&self, plant: Option<Plant>) -> Result<World, Fault> {
        let mut world = World::new(&self.config, plant)?;
        if !self.alphabet.texts.is_empty() {
            world.tell_texts();
        }
        Ok(world)
    }
}

/// What an enumeration found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// States, the first one included.
    pub states: u64,
    /// Events that the ledger accepted.
    pub transitions: u64,
    /// Calls that the ledger refused.
    pub refusals: u64,
    /// Reserves that were used to their last slot: (group, shape, lo, hi).
    pub reserves: u64,
    /// Whether it ended at the case's limit, with states left.
    pub is_cut: bool,
    /// Time it took.
    pub took: Duration,
}

/// A broken law and the events that lead to it.
#[derive(Debug, Clone)]
pub struct Broken {
    /// The law, with the numbers.
    pub fault: Fault,
    /// The events, from the empty ledger on.
    pub trace: Vec<Event>,
    /// States seen before it.
    pub states: u64,
}

/// A hasher for keys that are hashes already.
#[derive(Debug, Clone, Copy, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

/// Two multiply-and-fold hashes with different factors, side by side.
#[derive(Debug, Clone, Copy)]
struct Key([u64; 2]);

impl Key {
    fn new() -> Self {
        Self([0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344])
    }

    fn word(&mut self, word: u64) {
        for (half, factor) in self.0.iter_mut().zip([0x9E37_79B9_7F4A_7C15_u64, 0xC2B2_AE3D_27D4_EB4F]) {
            let wide = u128::from(*half ^ word) * u128::from(factor);
            *half = (wide as u64) ^ ((wide >> 64) as u64).rotate_left(17) ^ half.rotate_left(31);
        }
    }

    fn value(self) -> u128 {
        u128::from(self.0[0]) << 64 | u128::from(self.0[1])
    }
}

/// The identity of a world: the hash of its normal form.
#[must_use]
pub fn key(world: &World, alphabet: &Alphabet, names: &mut PageNames) -> u128 {
    let mut key = Key::new();
    world.write_normal_form(names, alphabet.deltas, &mut |word| key.word(word));
    key.value()
}

/// Where a state came from: its parent's number, and the index of the event among the parent's events.
type Origin = (u32, u16);

struct Explorer<'a> {
    case: &'a Case,
    plant: Option<Plant>,
    seen: HashSet<u128, BuildHasherDefault<KeyHasher>>,
    origins: Vec<Origin>,
    names: PageNames,
    /// (group, shape, lo, hi) -> end of the furthest write.
    reached: HashMap<(usize, usize, i32, i32), i64>,
    /// The most records that a row needed at once.
    ring_reached: i64,
    report: Report,
}

/// Enumerates the case, with a planted fault or none, and checks every law in every state. States are visited in the
/// order of their distance from the empty ledger, so the trace to a broken law is a shortest one.
///
/// # Errors
/// The first broken law; more than `max_states` states of a case that has no limit of its own.
pub fn explore(case: &Case, plant: Option<Plant>, max_states: u64) -> Result<Report, Box<Broken>> {
    let started = Instant::now();
    let mut explorer = Explorer {
        case,
        plant,
        seen: HashSet::default(),
        origins: Vec::new(),
        names: PageNames::default(),
        reached: HashMap::new(),
        ring_reached: 0,
        report: Report::default(),
    };
    let broken = |fault, trace, states| Box::new(Broken { fault, trace, states });
    let start = case.world(plant).map_err(|fault| broken(fault, Vec::new(), 0))?;
    explorer.is_new(&start, (0, 0));
    let mut work: VecDeque<(World, u32)> = VecDeque::from([(start, 0)]);
    while let Some((world, number)) = work.pop_front() {
        if let Err((fault, place)) = explorer.expand(&world, number, &mut work) {
            return Err(broken(fault, explorer.trace(number, place), explorer.report.states));
        }
        let states = explorer.report.states;
        explorer.report.is_cut = case.limit.is_some_and(|limit| states >= limit);
        if explorer.report.is_cut {
            break;
        }
        if states > max_states {
            return Err(broken(format!("more than {max_states} states"), Vec::new(), states));
        }
    }
    explorer.check_minimal().map_err(|fault| broken(fault, Vec::new(), explorer.report.states))?;
    explorer.report.took = started.elapsed();
    Ok(explorer.report)
}

impl Explorer<'_> {
    /// Counts the state if it is new, and returns its number.
    fn is_new(&mut self, world: &World, origin: Origin) -> Option<u32> {
        let key = key(world, &self.case.alphabet, &mut self.names);
        self.seen.insert(key).then(|| {
            self.report.states += 1;
            self.origins.push(origin);
            self.origins.len() as u32 - 1
        })
    }

    /// Applies every event to the world. A refused call must leave the world as it was. New worlds go to the worklist.
    fn expand(&mut self, world: &World, number: u32, work: &mut VecDeque<(World, u32)>) -> Result<(), (Fault, usize)> {
        let events = self.case.alphabet.events(world);
        let mut next = world.clone();
        let (mut settles, mut is_refused) = (world.flights.is_empty(), false);
        for (index, event) in events.iter().enumerate() {
            let fault = |fault| (fault, index);
            if !next.apply(event).map_err(fault)? {
                self.report.refusals += 1;
                is_refused = true;
                check_starved(world, event).map_err(fault)?;
                if self.plant == Some(Plant::LaunchStale) && matches!(event, Event::Call(Call::Launch { .. })) {
                    next.run_stale().map_err(fault)?;
                }
                continue;
            }
            settles |= leads_home(event);
            self.report.transitions += 1;
            if matches!(event, Event::Run { .. }) {
                self.ring_reached = self.ring_reached.max(next.device.ring_reached);
                for &(group, shape, lo, hi, end) in &next.device.reached {
                    let farthest = self.reached.entry((group, shape, lo, hi)).or_default();
                    *farthest = end.max(*farthest);
                }
            }
            if let Some(number) = self.is_new(&next, (number, index as u16)) {
                next.check().map_err(fault)?;
                work.push_back((std::mem::replace(&mut next, world.clone()), number));
            } else {
                next.clone_from(world);
            }
        }
        if is_refused && next.ledger.state_hash() != world.ledger.state_hash() {
            return Err(("a refused call changed the state".into(), events.len()));
        }
        if !settles {
            return Err(("livelock: nothing in flight can be brought nearer to its end".into(), events.len()));
        }
        Ok(())
    }

    /// The events from the empty ledger to the event at `index` of a state.
    fn trace(&self, number: u32, index: usize) -> Vec<Event> {
        let mut places = vec![index];
        let mut at = number;
        while at != 0 {
            let (parent, index) = self.origins[at as usize];
            places.push(usize::from(index));
            at = parent;
        }
        let Ok(mut world) = self.case.world(self.plant) else { return Vec::new() };
        let mut trace = Vec::new();
        for index in places.into_iter().rev() {
            let Some(event) = self.case.alphabet.events(&world).into_iter().nth(index) else { break };
            // The last one is the event that fails.
            world.apply(&event).ok();
            trace.push(event);
        }
        trace
    }

    /// Checks that every reserve was written to its last slot, and every row to its last page.
    fn check_minimal(&mut self) -> Result<(), Fault> {
        if !self.case.is_minimal || self.plant.is_some() {
            return Ok(());
        }
        let text = |error: specpool_core::Error| error.to_string();
        let world = World::new(&self.case.config, None)?;
        let mut furthest = vec![0; world.ledger.num_groups()];
        for (&(group, shape, lo, hi), &end) in &self.reached {
            let spec = world.ledger.group_spec(group).map_err(text)?;
            let geometry = Geometry::new(spec.page_size, spec.hosts_drafts, spec.layout).map_err(text)?;
            let need = Reserve::exact(geometry, world.ledger.shapes()[shape]).need(lo.into(), hi.into());
            // Readers of the holey layout fetch the whole pages of a branch, so its last page must be reached.
            let is_holey = spec.layout == Layout::Holey && world.ledger.shapes()[shape].topk > 1;
            let unit = if is_holey { spec.page_size } else { 1 };
            if end > need || end <= need - unit {
                return Err(format!(
                    "group {group}, shape {shape}, roots [{lo}, {hi}]: {need} slots reserved, {end} reached"
                ));
            }
            furthest[group] = end.max(furthest[group]);
        }
        for (group, &end) in furthest.iter().enumerate() {
            let width = world.ledger.row_width(group).map_err(text)?;
            let page_size = world.ledger.group_spec(group).map_err(text)?.page_size;
            if end <= width - page_size {
                return Err(format!("group {group}: rows are {width} wide, {end} slots were ever reached"));
            }
            let mut narrow = self.case.config.clone();
            let widths = (0..furthest.len()).map(|at| world.ledger.row_width(at)).collect::<Result<Vec<_>, _>>();
            let mut widths = widths.map_err(text)?;
            widths[group] -= page_size;
            narrow.row_width = Some(widths);
            if World::new(&narrow, None).is_ok() {
                return Err(format!("group {group}: a row width of {} is accepted", width - page_size));
            }
        }
        self.check_minimal_states(&world)?;
        self.report.reserves = self.reached.len() as u64;
        Ok(())
    }

    /// Checks that a row needed every record of its ring at once, and that the ledger refuses a smaller pool of slots
    /// than the least.
    fn check_minimal_states(&self, world: &World) -> Result<(), Fault> {
        let Some(states) = self.case.config.states.first() else { return Ok(()) };
        let ring_len = world.ledger.state_ring_len(0).map_err(|error| error.to_string())?;
        // If every round folds its root, none leaves tokens for a later fold.
        let is_root_only = world.ledger.shapes().iter().all(|shape| shape.num_draft_tokens == 1);
        let folds_all = states.eager && self.case.config.overlap_depth == 0 && is_root_only;
        let ring_len = if folds_all { ring_len - (states.flush - 1) } else { ring_len };
        if self.ring_reached != ring_len {
            return Err(format!("rings have {ring_len} records, {} were ever needed at once", self.ring_reached));
        }
        let (least, mut narrow) = (1 + i64::from(self.case.config.sessions), self.case.config.clone());
        narrow.states = vec![StateGroup { num_slots: least - 1, ..states.clone() }];
        if World::new(&narrow, None).is_ok() {
            return Err(format!("a pool of {} state slots is accepted", least - 1));
        }
        Ok(())
    }
}

/// The events that bring something in flight closer to its end.
fn leads_home(event: &Event) -> bool {
    match event {
        Event::Run { .. } => true,
        Event::Fail => false,
        Event::Call(op) => matches!(
            op,
            Call::Launch { .. }
                | Call::Resolve { .. }
                | Call::Complete { .. }
                | Call::Cancel { .. }
                | Call::Abandon { .. }
        ),
    }
}

/// Checks that a single request that lacks pages can always be served in the end.
fn check_starved(world: &World, event: &Event) -> Result<(), Fault> {
    match event {
        Event::Call(
            op @ (Call::PrepareExtend { rows, .. }
            | Call::PrepareExtendKeeping { rows, .. }
            | Call::PrepareDecode { rows, .. }),
        ) if rows.len() == 1 => check_progress(world, op, rows[0]),
        _ => Ok(()),
    }
}
