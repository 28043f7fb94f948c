//! A step of an engine whose steps run one after the other, and whose table holds slots, on the host: its launch, its
//! new cells and its end are one call.

use pyo3::prelude::*;
use specpool_core::Result as CoreResult;

use crate::arrays::{cells_mut, int_array, ints, per_row, step};
use crate::errors::{shape_error, to_py};
use crate::ledger::Ledger;

/// `int32 [rows, width]`: the slot of each position of each row.
struct SlotTable<'a> {
    cells: &'a mut [i32],
    width: usize,
    page_size: usize,
}

impl<'a> SlotTable<'a> {
    /// # Errors
    /// `ShapeError`: not of that type, too small for the ledger's rows or slots, or the ledger has several groups.
    fn new(ledger: &Ledger, cells: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        let (cells, dims) = cells_mut("slot_table", cells)?;
        if ledger.0.num_groups() != 1 {
            return Err(shape_error(format!("a slot table is of 1 group, the ledger has {}", ledger.0.num_groups())));
        }
        let (spec, table) = (ledger.0.group_spec(0), ledger.0.page_table(0));
        let (Ok(spec), Ok(table)) = (spec, table) else { return Err(shape_error("no group".into())) };
        let page_size = spec.page_size as usize;
        let needed = [ledger.0.num_rows() + 1, table.pages_per_row() * page_size];
        if dims[0] < needed[0] || dims[1] < needed[1] {
            return Err(shape_error(format!("slot_table must have shape {needed:?} or more, got {dims:?}")));
        }
        let last = (spec.num_pages + 1) * spec.page_size - 1;
        if last > i64::from(i32::MAX) {
            return Err(shape_error(format!("the group's last slot is {last}, a slot table is of int32")));
        }
        Ok(Self { cells, width: dims[1], page_size })
    }

    /// Launches a prepared step, writes the slots of its new cells, and completes it.
    fn launch(&mut self, ledger: &mut specpool_core::Ledger, step: u64) -> CoreResult<()> {
        ledger.launch(step)?;
        ledger.drain_delta(step, |_, row, column, page| {
            let first = row.at() * self.width + column * self.page_size;
            let slots = page.0 * self.page_size as i32..;
            self.cells[first..first + self.page_size].iter_mut().zip(slots).for_each(|(cell, slot)| *cell = slot);
        })?;
        ledger.complete(step)
    }
}

#[doc = doc!("launch_into")]
#[pyfunction]
pub fn launch_into(
    mut ledger: PyRefMut<'_, Ledger>,
    step: &Bound<'_, PyAny>,
    slot_table: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let step = self::step(step)?;
    let mut table = SlotTable::new(&ledger, slot_table)?;
    ledger.change(|ledger| table.launch(ledger, step))
}

#[doc = doc!("decode_into")]
#[pyfunction]
pub fn decode_into(
    mut ledger: PyRefMut<'_, Ledger>,
    rows: &Bound<'_, PyAny>,
    shapes: &Bound<'_, PyAny>,
    slot_table: &Bound<'_, PyAny>,
) -> PyResult<(u64, Vec<i32>)> {
    let rows = int_array("rows", rows)?;
    let shapes = per_row("shapes", shapes, rows.len())?;
    let mut table = SlotTable::new(&ledger, slot_table)?;
    let plan = ledger.change(|ledger| {
        ledger.check_lone_decode()?;
        let plan = ledger.prepare_decode(&rows, &shapes, true)?;
        table.launch(ledger, plan.step)?;
        Ok(plan)
    })?;
    Ok((plan.step, plan.allocated_after.clone()))
}

#[doc = doc!("round_slots")]
#[pyfunction]
pub fn round_slots(ledger: &Ledger, rows: &Bound<'_, PyAny>, shapes: &Bound<'_, PyAny>) -> PyResult<i64> {
    let rows = ints("rows", rows)?;
    let shapes = per_row("shapes", shapes, rows.len())?;
    let required = ledger.0.tokens_required(&rows, &shapes).map_err(to_py)?;
    Ok(required.iter().sum())
}
