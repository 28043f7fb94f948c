//! Runs a random ledger under the operations that the bytes encode. Nothing panics, a refused call changes nothing,
//! and the audit finds nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use specpool_check::decode::{OP_BYTES, decode};
use specpool_check::scene::Scene;
use specpool_check::soak::{Rng, random_config};
use specpool_core::{Ledger, Snapshots};

const MOST_CALLS: usize = 100;

fuzz_target!(|data: &[u8]| {
    let Some((seed, ops)) = data.split_first_chunk::<8>() else { return };
    let Ok(mut ledger) = Ledger::new(random_config(&mut Rng::new(u64::from_le_bytes(*seed)))) else { return };
    let mut scene = Scene { has_index: true, ..Scene::default() };
    for code in ops.chunks(OP_BYTES).take(MOST_CALLS) {
        scene.read(&ledger);
        let state = ledger.state_hash();
        if decode(code, &scene).run(&mut ledger, None, &mut Snapshots::default()).is_err() {
            assert_eq!(ledger.state_hash(), state, "a refused call has changed the ledger");
        }
    }
    ledger.check().expect("the audit finds nothing");
});
