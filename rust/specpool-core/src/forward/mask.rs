//! Which cells of their row the queries of one forward see: the prefix, then the forward's own cells.

use crate::check::{fit, not_negative, same_len};
use crate::error::{Error, Result};
use crate::memory::filled;

/// The lanes of one forward. Column `c` of a lane is the cell at in-row position `c`. The *own* cells, which the
/// forward writes, start at `starts[lane]`.
#[derive(Debug, Clone, Copy)]
pub struct MaskLanes<'a> {
    /// `[n]`: first own cell; every query sees the cells below.
    pub starts: &'a [i32],
    /// `[n]`: number of queries that are not padding.
    pub q_lens: &'a [i32],
    /// Q: queries per lane, padding included.
    pub num_queries: usize,
    /// `[n, Q, W]`: whether query i sees own cell j; `None` = causal, `j <= i`.
    pub own_mask: Option<&'a [bool]>,
    /// `[n, Q]`: each query's position in the sequence; `None` = `starts + i`.
    pub q_positions: Option<&'a [i32]>,
    /// `[n, W]`: each own cell's position in the sequence; `None` = `starts + j`.
    pub own_positions: Option<&'a [i32]>,
    /// W of `own_mask` and `own_positions`. Without these arrays a lane has `q_lens` own cells.
    pub own_width: usize,
    /// A query sees only positions above its own position minus this.
    pub window: Option<i64>,
    /// Beside its window, a query sees positions below this.
    pub sink: i64,
}

/// `[n, Q, num_columns]`: true where the query sees the column. Padded queries see column 0 only.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, or a visible own cell lies beyond the last column.
pub fn attention_mask(lanes: &MaskLanes, num_columns: usize) -> Result<Vec<bool>> {
    visibility(lanes, num_columns, false, true)
}

/// The same as a bias of the scores: 0 where the query sees the column, else -inf.
///
/// # Errors
/// As [`attention_mask`].
pub fn attention_bias(lanes: &MaskLanes, num_columns: usize) -> Result<Vec<f32>> {
    visibility(lanes, num_columns, f32::NEG_INFINITY, 0.0)
}

fn visibility<T: Copy>(lanes: &MaskLanes, num_columns: usize, unseen: T, seen: T) -> Result<Vec<T>> {
    let (n, q, w) = (lanes.starts.len(), lanes.num_queries, lanes.own_width);
    lanes.check(num_columns)?;
    let mut mask = filled(unseen, fit("mask", &[n, q, num_columns])?, "an attention mask")?;
    for lane in 0..n {
        let start = not_negative("starts", lane, lanes.starts[lane])? as usize;
        let len = not_negative("q_lens", lane, lanes.q_lens[lane])? as usize;
        let own_cells = if lanes.own_mask.is_some() || lanes.own_positions.is_some() { w } else { len };
        let causal_end = if lanes.own_mask.is_none() { len } else { 0 };
        if len > q || start + causal_end > num_columns || causal_end > own_cells {
            return Err(Error::Shape(format!(
                "lane {lane} has {len} queries from column {start}: need q_lens <= {q} queries, own cells <= {own_cells} \
                 and columns <= {num_columns}"
            )));
        }
        for query in 0..q {
            let at = lane * q + query;
            let cells = &mut mask[at * num_columns..][..num_columns];
            if query >= len {
                cells[0] = seen;
                continue;
            }
            let position = lanes.q_positions.map_or((start + query) as i64, |positions| i64::from(positions[at]));
            // First position inside the window; a cell below `start` stands at its own index.
            let from = lanes.window.map_or(0, |window| (position - window + 1).max(0));
            if (from as usize) < start {
                cells[from as usize..start].fill(seen);
            }
            cells[..start.min(lanes.sink as usize)].fill(seen);
            match lanes.own_mask {
                None => cells[start..=start + query].fill(seen),
                Some(own_mask) => {
                    let own_mask = &own_mask[at * w..][..w];
                    let room = (num_columns - start.min(num_columns)).min(w);
                    if let Some(beyond) = own_mask[room..].iter().position(|&visible| visible) {
                        return Err(Error::Shape(format!(
                            "own_mask[{lane}, {query}, {}] is column {} of {num_columns}",
                            room + beyond,
                            start + room + beyond
                        )));
                    }
                    for (cell, _) in cells.iter_mut().skip(start).zip(own_mask).filter(|&(_, &visible)| visible) {
                        *cell = seen;
                    }
                }
            }
            if lanes.window.is_some() {
                for (j, cell) in cells.iter_mut().skip(start).take(own_cells).enumerate() {
                    let position =
                        lanes.own_positions.map_or((start + j) as i64, |positions| i64::from(positions[lane * w + j]));
                    if position < from && position >= lanes.sink {
                        *cell = unseen;
                    }
                }
            }
        }
    }
    Ok(mask)
}

impl MaskLanes<'_> {
    fn check(&self, num_columns: usize) -> Result<()> {
        let (n, q, w) = (self.starts.len(), self.num_queries, self.own_width);
        same_len("q_lens", self.q_lens.len(), n)?;
        if num_columns == 0 {
            return Err(Error::Shape("num_columns must be 1 or more, got 0".into()));
        }
        if let Some(lane) = self.starts.iter().position(|&start| start > 0 && start as usize > num_columns) {
            let start = self.starts[lane];
            return Err(Error::Shape(format!("starts[{lane}] must be in [0, {num_columns}], got {start}")));
        }
        if self.window.is_some_and(|window| window < 1) {
            return Err(Error::Shape(format!("window must be 1 or more, got {}", self.window.unwrap_or(0))));
        }
        if self.sink < 0 {
            return Err(Error::Shape(format!("sink must be 0 or more, got {}", self.sink)));
        }
        if let Some(own_mask) = self.own_mask {
            same_len("own_mask", own_mask.len(), fit("own_mask", &[n, q, w])?)?;
        }
        if let Some(positions) = self.q_positions {
            same_len("q_positions", positions.len(), fit("q_positions", &[n, q])?)?;
        }
        if let Some(positions) = self.own_positions {
            same_len("own_positions", positions.len(), fit("own_positions", &[n, w])?)?;
        }
        Ok(())
    }
}
