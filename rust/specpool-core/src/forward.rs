//! Where things lie for one forward (slots, masks, moves), and attention over pages on a CPU.

pub mod attention;
pub mod draft_cells;
pub mod mask;
pub mod moves;
pub mod pages;
pub mod slots;
