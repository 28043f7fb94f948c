//! The full audit: every page and every row is counted, and the sums must meet (spec 4 and 11, level 2).

use crate::error::{Error, Result};
use crate::group::GroupState;
use crate::ids::{Page, Row};
use crate::ledger::Ledger;
use crate::step::StepKind;

/// Lines of a report before it is cut.
const MAX_LINES: usize = 20;

impl Ledger {
    /// Checks every invariant of the ledger, O(pages + table cells).
    ///
    /// # Errors
    /// [`Error::Corrupt`] with one line for each broken rule.
    pub fn check(&self) -> Result<()> {
        let mut report = Vec::new();
        self.audit_rows(&mut report);
        self.audit_rounds(&mut report);
        for group in &self.groups {
            self.audit_group(group, &mut report);
        }
        if report.is_empty() {
            return Ok(());
        }
        let hidden = report.len().saturating_sub(MAX_LINES);
        report.truncate(MAX_LINES);
        if hidden > 0 {
            report.push(format!("and {hidden} more"));
        }
        Err(Error::Corrupt(report.join("; ")))
    }

    fn audit_rows(&self, report: &mut Vec<String>) {
        let rows = &self.rows;
        let live = rows.live.iter().filter(|&&live| live).count();
        let (free, fenced) = (rows.free().len(), rows.fenced().len());
        if live + free + fenced != rows.num_rows() {
            report.push(format!("{live} live + {free} free + {fenced} fenced rows are not {}", rows.num_rows()));
        }
        let mut listed = vec![false; rows.num_rows() + 1];
        for &row in rows.free().iter().chain(rows.fenced().iter().map(|(_, row)| row)) {
            if rows.live[row.at()] || std::mem::replace(&mut listed[row.at()], true) {
                report.push(format!("row {} is given back, and live or given back twice", row.0));
            }
        }
        for at in 0..=rows.num_rows() {
            let (r, k, hi, drafted) = (rows.resolved[at], rows.in_flight[at], rows.hi[at], rows.drafted[at]);
            let name = || rows.describe(Row(at as i32));
            if !rows.live[at] && (r, k, hi, drafted) != (0, 0, 0, 0) {
                report.push(format!("{} is not admitted but reads r={r} k={k} hi={hi} drafted={drafted}", name()));
            }
            if r < 0 || k < 0 || k > self.overlap_depth + 1 || hi < r + k || drafted < 0 || drafted > r {
                report.push(format!("{}: r={r} k={k} hi={hi} drafted={drafted}", name()));
            }
            for group in &self.groups {
                let a = group.allocated[at];
                let name_of_group = &group.spec.name;
                if a < r.saturating_add(k) || i64::from(a) % group.page_size != 0 || i64::from(a) > group.row_width {
                    report.push(format!(
                        "{} in group {name_of_group}: kv_committed_len {} allocated_len {a} row_width {}",
                        name(),
                        r.saturating_add(k),
                        group.row_width
                    ));
                }
                if !rows.live[at] && a != 0 {
                    report.push(format!("{} is not admitted but holds {a} slots in group {name_of_group}", name()));
                }
            }
        }
    }

    /// The per-row counts of rounds must be those of the steps in flight.
    fn audit_rounds(&self, report: &mut Vec<String>) {
        let rows = &self.rows;
        let len = rows.num_rows() + 1;
        let (mut hi, mut launched) = (rows.resolved.clone(), vec![0; len]);
        let (mut undrafted, mut rounds) = (vec![0; len], vec![Vec::new(); len]);
        for record in self.steps.all().filter(|record| record.plan.kind == StepKind::Decode && !record.resolved) {
            let plan = &record.plan;
            for (lane, &row) in plan.rows.iter().enumerate() {
                let at = row as usize;
                if plan.epochs[lane] == rows.epoch[at] {
                    hi[at] += self.shape_facts[plan.shapes[lane] as usize].max_accept_len;
                    launched[at] += i32::from(self.steps.is_launched(plan.step));
                    undrafted[at] += i32::from(!plan.writes_draft);
                    rounds[at].push(plan.step);
                }
            }
        }
        for at in 1..len {
            let row = Row(at as i32);
            let k = rows.in_flight[at].clamp(0, self.overlap_depth + 1);
            if rounds[at].len() != k as usize || rows.rounds_in_flight(row) != rounds[at] {
                report.push(format!("{}: in_flight {k}, steps in flight {:?}", rows.describe(row), rounds[at]));
            } else if (rows.hi[at], rows.launched_rounds[at], rows.undrafted_rounds[at])
                != (hi[at], launched[at], undrafted[at])
            {
                report.push(format!(
                    "{}: hi {} launched {} undrafted {}, the steps say {} {} {}",
                    rows.describe(row),
                    rows.hi[at],
                    rows.launched_rounds[at],
                    rows.undrafted_rounds[at],
                    hi[at],
                    launched[at],
                    undrafted[at]
                ));
            }
        }
    }

    /// Owned pages and table cells must be the same thing seen from two sides.
    fn audit_group(&self, group: &GroupState, report: &mut Vec<String>) {
        let name = &group.spec.name;
        let mut cells_in_use = 0;
        for at in 0..=self.rows.num_rows() {
            let row = Row(at as i32);
            let held = (i64::from(group.allocated[at]) / group.page_size) as usize;
            let row_name = self.rows.describe(row);
            for (column, &page) in group.table.row(row).iter().enumerate() {
                if column >= held {
                    if page != 0 {
                        report
                            .push(format!("{row_name} column {column} of group {name} is page {page}, beyond its end"));
                    }
                } else if let Err(record) = group.pool.check_owned(Page(page), row) {
                    report.push(format!(
                        "{row_name} column {column} of group {name} is page {page}, which is {}, owner {}",
                        record.state,
                        self.rows.describe(record.owner)
                    ));
                } else {
                    cells_in_use += 1;
                }
            }
        }
        let pool = &group.pool;
        let (free, fenced, all) = (pool.num_free(), pool.num_fenced(), pool.num_pages());
        if cells_in_use + free + fenced != all {
            report.push(format!(
                "group {name}: {cells_in_use} pages in rows + {free} free + {fenced} fenced are not {all}"
            ));
        }
        let parts = pool.broken(self.steps.completed()).into_iter().chain(group.delta.broken());
        report.extend(parts.map(|line| format!("group {name}: {line}")));
    }
}
