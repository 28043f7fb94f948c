//! The full audit: counts every page and every row, and checks the sums (busy check, level 2).

use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::ledger::Ledger;
use crate::memory::{self, filled, room, zeroed};
use crate::state::group::Kept;
use crate::state::page_pool::{PageCounts, PageState};
use crate::state::step::StepKind;

/// Lines of a report before it is cut.
const MAX_LINES: usize = 20;

/// One broken rule, and its subject as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Index of the group.
    pub group: Option<usize>,
    /// The page of that group; 0 if a row holds the sink.
    pub page: Option<Page>,
    /// The row: live or not, or row 0.
    pub row: Option<Row>,
    /// The rule, with the numbers.
    pub text: String,
}

impl Finding {
    /// A finding about the ledger, or about one group.
    fn of(group: Option<usize>, text: String) -> Self {
        Self { group, page: None, row: None, text }
    }

    fn of_row(at: usize, group: Option<usize>, text: String) -> Self {
        Self { row: Some(Row(at as i32)), ..Self::of(group, text) }
    }

    fn of_page(at: usize, group: usize, text: String) -> Self {
        Self { page: Some(Page(at as i32)), ..Self::of(Some(group), text) }
    }
}

impl Ledger {
    /// Checks every invariant of the ledger, O(pages + table cells).
    ///
    /// # Errors
    /// [`Error::Corrupt`] with one line for each broken rule, [`Error::OutOfMemory`].
    pub fn check(&self) -> Result<()> {
        let report = self.audit()?;
        if report.is_empty() {
            return Ok(());
        }
        let hidden = report.len().saturating_sub(MAX_LINES);
        let mut report: Vec<String> = report.into_iter().take(MAX_LINES).map(|finding| finding.text).collect();
        if hidden > 0 {
            report.push(format!("and {hidden} more"));
        }
        Err(Error::Corrupt(report.join("; ")))
    }

    /// Returns every broken invariant of the ledger, O(pages + table cells); empty if there is none.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for the counts.
    pub fn audit(&self) -> Result<Vec<Finding>> {
        let mut report = Vec::new();
        self.audit_rows(&mut report)?;
        self.audit_rounds(&mut report)?;
        for group in 0..self.groups.len() {
            self.audit_group(group, &mut report)?;
        }
        Ok(report)
    }

    fn audit_rows(&self, report: &mut Vec<Finding>) -> Result<()> {
        let rows = &self.rows;
        let live = rows.live.iter().filter(|&&live| live).count();
        let (free, fenced) = (rows.num_free(), rows.num_fenced());
        if live + free + fenced != rows.num_rows() {
            let all = rows.num_rows();
            report.push(Finding::of(None, format!("{live} live + {free} free + {fenced} fenced rows are not {all}")));
        }
        let idle = rows.idle.iter().filter(|&&idle| idle).count();
        if idle != rows.num_idle {
            report.push(Finding::of(None, format!("{idle} rows are idle, {} are counted", rows.num_idle)));
        }
        let mut listed = zeroed(rows.num_rows() + 1, "an audit of rows")?;
        for row in rows.free().chain(rows.fenced().iter().map(|&(_, row)| row)) {
            if rows.live[row.at()] || std::mem::replace(&mut listed[row.at()], true) {
                let text = format!("row {} is given back, and live or given back twice", row.0);
                report.push(Finding::of_row(row.at(), None, text));
            }
        }
        for at in 0..=rows.num_rows() {
            let (r, k, hi, drafted) = (rows.resolved[at], rows.in_flight[at], rows.hi[at], rows.drafted[at]);
            let name = || rows.describe(Row(at as i32));
            if !rows.live[at] && (r, k, hi, drafted) != (0, 0, 0, 0) {
                let text = format!("{} is not admitted but reads r={r} k={k} hi={hi} drafted={drafted}", name());
                report.push(Finding::of_row(at, None, text));
            }
            let checkpoint = rows.checkpoint(Row(at as i32)).unwrap_or(0);
            if !rows.live[at] && (rows.idle[at] || checkpoint != 0) || checkpoint > r {
                let text = format!("{}: r={r} idle={} checkpoint={checkpoint}", name(), rows.idle[at]);
                report.push(Finding::of_row(at, None, text));
            }
            if r < 0 || k < 0 || k > self.overlap_depth + 1 || hi < r + k || drafted < 0 || drafted > r {
                let text = format!("{}: r={r} k={k} hi={hi} drafted={drafted}", name());
                report.push(Finding::of_row(at, None, text));
            }
            for (number, group) in self.groups.iter().enumerate() {
                let a = group.allocated[at];
                let name_of_group = &group.spec.name;
                if a < r.saturating_add(k) || i64::from(a) % group.page_size != 0 || i64::from(a) > group.row_width {
                    let text = format!(
                        "{} in group {name_of_group}: kv_committed_len {} allocated_len {a} row_width {}",
                        name(),
                        r.saturating_add(k),
                        group.row_width
                    );
                    report.push(Finding::of_row(at, Some(number), text));
                }
                let (e, p) = (group.evicted[at], group.protected[at]);
                let is_whole = |len: i32| i64::from(len) % group.page_size == 0;
                if !is_whole(e)
                    || !is_whole(p)
                    || e < 0
                    || p < 0
                    || p > r
                    || i64::from(e) > group.evict_to(rows.settled(Row(at as i32)))
                {
                    let text = format!(
                        "{} in group {name_of_group}: r={r} protected_len {p} evicted_len {e}, at most {} is out of its window",
                        name(),
                        group.evict_to(rows.settled(Row(at as i32)))
                    );
                    report.push(Finding::of_row(at, Some(number), text));
                }
                if !rows.live[at] && a != 0 {
                    let text = format!("{} is not admitted but holds {a} slots in group {name_of_group}", name());
                    report.push(Finding::of_row(at, Some(number), text));
                }
            }
        }
        Ok(())
    }

    /// The per-row counts of rounds must equal those of the steps in flight.
    fn audit_rounds(&self, report: &mut Vec<Finding>) -> Result<()> {
        let rows = &self.rows;
        let (len, what) = (rows.num_rows() + 1, "an audit of rounds");
        let (mut hi, mut launched) = (memory::copied(&rows.resolved, what)?, zeroed(len, what)?);
        let (mut undrafted, mut rounds) = (zeroed(len, what)?, filled(Vec::<u64>::new(), len, what)?);
        for record in self.steps.all().filter(|record| record.plan.kind == StepKind::Decode && !record.resolved) {
            let plan = &record.plan;
            for (lane, &row) in plan.rows.iter().enumerate() {
                let at = row as usize;
                if plan.epochs[lane] == rows.epoch[at] {
                    hi[at] += self.shapes[plan.shapes[lane] as usize].max_accept_len() as i32;
                    launched[at] += i32::from(self.steps.is_launched(plan.step));
                    undrafted[at] += i32::from(!plan.writes_draft);
                    room(&mut rounds[at], 1, what)?;
                    rounds[at].push(plan.step);
                }
            }
        }
        for at in 1..len {
            let row = Row(at as i32);
            let k = rows.in_flight[at].clamp(0, self.overlap_depth + 1);
            if rounds[at].len() != k as usize || rows.rounds_in_flight(row) != rounds[at] {
                let text = format!("{}: in_flight {k}, steps in flight {:?}", rows.describe(row), rounds[at]);
                report.push(Finding::of_row(at, None, text));
            } else if (rows.hi[at], rows.launched_rounds[at], rows.undrafted_rounds[at])
                != (hi[at], launched[at], undrafted[at])
            {
                let text = format!(
                    "{}: hi {} launched {} undrafted {}, the steps say {} {} {}",
                    rows.describe(row),
                    rows.hi[at],
                    rows.launched_rounds[at],
                    rows.undrafted_rounds[at],
                    hi[at],
                    launched[at],
                    undrafted[at]
                );
                report.push(Finding::of_row(at, None, text));
            }
        }
        Ok(())
    }

    /// The pages that are held must match the cells, checkpoints, prefixes and copies that hold them.
    fn audit_group(&self, at: usize, report: &mut Vec<Finding>) -> Result<()> {
        let group = &self.groups[at];
        let (name, pool) = (&group.spec.name, &group.pool);
        // The pages that a checkpoint kept outside the table were not shared together with those in the table.
        let has_checkpoints = self.sessions && group.spec.window.is_some();
        let mut counts = filled(PageCounts::default(), pool.num_mapped(), "an audit of pages")?;
        let mut count = |page: Page, is_idle: bool| {
            if let Some(counts) = counts.get_mut(page.at()) {
                counts.holders += 1;
                counts.idle_holders += u32::from(is_idle);
            }
        };
        for row in (0..=self.rows.num_rows()).map(|row| Row(row as i32)) {
            let held = group.held_columns(row);
            let own = (i64::from(group.protected[row.at()].max(0)) / group.page_size) as usize;
            let row_name = || self.rows.describe(row);
            for (column, &cell) in group.table.row(row).iter().enumerate() {
                let page = Page(cell);
                let record = pool.record(page);
                let mut found = |text: String| {
                    let of_row = Finding::of_row(row.at(), Some(at), text);
                    report.push(Finding { page: record.map(|record| record.page), ..of_row });
                };
                if !held.contains(&column) {
                    if cell != 0 {
                        found(format!("{} column {column} of group {name} is page {cell}, beyond its end", row_name()));
                    }
                    continue;
                }
                let is_shared = record.is_some_and(|record| record.state == PageState::Shared);
                if let Err(record) = pool.check_held(page, row) {
                    found(format!(
                        "{} column {column} of group {name} is page {cell}, which is {}, owner {}",
                        row_name(),
                        record.state,
                        self.rows.describe(record.owner)
                    ));
                } else if is_shared && column >= own {
                    found(format!(
                        "{} column {column} of group {name} is page {cell}, which is shared, beyond protected_len {}",
                        row_name(),
                        group.protected[row.at()]
                    ));
                } else if !is_shared && column < own && !has_checkpoints {
                    found(format!(
                        "{} column {column} of group {name} is page {cell}, which is owned, below protected_len {}",
                        row_name(),
                        group.protected[row.at()]
                    ));
                }
                count(page, self.rows.idle[row.at()]);
            }
            self.audit_checkpoint(at, row, report);
            group.kept(row).iter().for_each(|kept| count(kept.page, self.rows.idle[row.at()]));
        }
        self.prefix_holders(at).for_each(|page| count(page, false));
        let riding = self.steps.unlaunched().flat_map(|record| &record.before.copies);
        for copy in self.copies.iter().chain(riding).filter(|copy| copy.group() == at) {
            copy.pages().iter().for_each(|page| counts[page.at()].copies += 1);
        }
        for (page, (found, marked)) in counts.iter().zip(pool.counts()).enumerate() {
            if (found.holders, found.copies) != (marked.holders, marked.copies) {
                let text = format!(
                    "page {page} of group {name}: {} holders and {} copies, the pool counts {} and {}",
                    found.holders, found.copies, marked.holders, marked.copies
                );
                report.push(Finding::of_page(page, at, text));
            }
            if found.idle_holders != marked.idle_holders {
                let text = format!(
                    "page {page} of group {name}: {} of its holders are idle rows, the pool counts {}",
                    found.idle_holders, marked.idle_holders
                );
                report.push(Finding::of_page(page, at, text));
            }
        }
        let held = pool.counts().filter(|counts| counts.holders > 0).count();
        let (free, fenced, all) = (pool.num_free(), pool.num_fenced(), pool.num_pages());
        if held + free + fenced != all {
            let text = format!("group {name}: {held} pages held + {free} free + {fenced} fenced are not {all}");
            report.push(Finding::of(Some(at), text));
        }
        let of_delta = group.delta.broken().map(|line| (None, line));
        let parts = pool.broken(self.steps.completed())?.into_iter().chain(of_delta);
        report.extend(parts.map(|(page, line)| {
            let text = format!("group {name}: {line}");
            Finding { page, ..Finding::of(Some(at), text) }
        }));
        Ok(())
    }

    /// A checkpoint's pages are all held, and those outside the table lie below e.
    fn audit_checkpoint(&self, at: usize, row: Row, report: &mut Vec<Finding>) {
        let group = &self.groups[at];
        let needed = group.checkpoint_columns(self.rows.checkpoint(row));
        let below = group.held_columns(row).start;
        let is_right = |kept: &Kept| needed.contains(&(kept.column as usize)) && (kept.column as usize) < below;
        let kept = group.kept(row);
        let held = |column: usize| group.held_columns(row).contains(&column);
        let kept_at = |column: usize| kept.iter().any(|kept| kept.column as usize == column);
        let is_complete = needed.clone().all(|column| held(column) || kept_at(column));
        if !kept.iter().all(is_right) || !is_complete || !kept.is_sorted_by_key(|kept| kept.column) {
            let text = format!(
                "{} in group {}: the checkpoint needs columns {needed:?}, e is at {below}, kept are {kept:?}",
                self.rows.describe(row),
                group.spec.name
            );
            report.push(Finding::of_row(row.at(), Some(at), text));
        }
    }
}

/// Plants faults that no public call can cause, and checks that the audit finds them.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::shape::Shape;
    use crate::state::config::LedgerConfig;
    use crate::state::group::Group;
    use crate::verb::Verb;

    /// One row of 10 tokens on pages of 4, with one round of shape 1 in flight.
    fn busy() -> (Ledger, Row) {
        let group = Group {
            name: "kv".into(),
            page_size: 4,
            num_pages: 20,
            hosts_drafts: true,
            layout: Layout::Dense,
            window: None,
        };
        let shapes = vec![Shape::eagle(3, 1, 4).unwrap()];
        let mut config = LedgerConfig::new(vec![group], shapes, 2, 40);
        config.overlap_depth = 1;
        let mut ledger = Ledger::new(config).unwrap();
        let row = ledger.admit(Some("request-7")).unwrap();
        let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
        ledger.launch(step).unwrap();
        let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.check().unwrap();
        (ledger, row)
    }

    fn report(ledger: &Ledger) -> String {
        ledger.check().unwrap_err().to_string()
    }

    #[test]
    fn every_planted_fault_is_reported() {
        type Fault = fn(&mut Ledger, Row);
        let faults: [(&str, Fault); 14] = [
            ("page 1 of group kv: 0 of its holders are idle rows, the pool counts 1", |ledger, _| {
                ledger.groups[0].pool.rest(Page(1));
            }),
            ("page 2 of group kv: 1 of its holders are idle rows, the pool counts 0", |ledger, row| {
                ledger.rows.set_idle(row, true);
            }),
            ("is page 1, which is owned, below protected_len 4", |ledger, row| {
                ledger.groups[0].protected[row.at()] = 4;
            }),
            ("kv_committed_len 17 allocated_len 16", |ledger, row| {
                ledger.rows.resolved[row.at()] = 16;
                ledger.rows.hi[row.at()] = 20;
            }),
            ("in_flight 0", |ledger, row| ledger.rows.in_flight[row.at()] = 0),
            ("hi 99", |ledger, row| ledger.rows.hi[row.at()] = 99),
            ("launched 0", |ledger, row| ledger.rows.launched_rounds[row.at()] = 0),
            ("drafted=11", |ledger, row| ledger.rows.drafted[row.at()] = 11),
            ("is page 1, beyond its end", |ledger, row| {
                let cell = ledger.groups[0].table.cell(row, 5);
                ledger.groups[0].table.set(cell, Page(1));
            }),
            ("which is free", |ledger, row| {
                ledger.groups[0].pool.release(Page(2), row, 0, 0, Verb::Trim).unwrap();
            }),
            ("page 5 of group kv: 0 holders and 0 copies, the pool counts 1 and 0", |ledger, row| {
                ledger.groups[0].pool.take(row, 1, Verb::Trim).unwrap();
            }),
            ("2 live + 1 free + 0 fenced rows are not 2", |ledger, _| ledger.rows.live[2] = true),
            ("row 2 is not admitted but reads r=3", |ledger, _| ledger.rows.resolved[2] = 3),
            ("row 0: r=0 k=1", |ledger, _| ledger.rows.in_flight[0] = 1),
        ];
        for (expected, plant) in faults {
            let (mut ledger, row) = busy();
            plant(&mut ledger, row);
            let found = report(&ledger);
            assert!(found.contains(expected), "{expected:?} is not in {found:?}");
        }
    }

    /// (group, page, row) of each finding: what the busy check takes out of use.
    #[test]
    fn a_finding_names_what_it_is_about() {
        type Fault = fn(&mut Ledger, Row);
        type About = (Option<usize>, Option<i32>, Option<i32>);
        let faults: [(&[About], Fault); 5] = [
            (&[(None, None, Some(1))], |ledger, row| ledger.rows.drafted[row.at()] = 11),
            (&[(Some(0), Some(4), Some(1)), (Some(0), Some(4), None)], |ledger, row| {
                ledger.groups[0].allocated[row.at()] = 12; // one page less than the row holds
            }),
            (&[(Some(0), Some(1), None), (Some(0), Some(4), None)], |ledger, row| {
                let cell = ledger.groups[0].table.cell(row, 3);
                ledger.groups[0].table.set(cell, Page(1)); // the same page twice in the row
            }),
            (&[(Some(0), Some(5), None)], |ledger, row| {
                ledger.groups[0].pool.take(row, 1, Verb::Trim).unwrap();
            }),
            (&[(None, None, None)], |ledger, _| ledger.rows.num_idle = 1),
        ];
        assert_eq!(busy().0.audit(), Ok(vec![]));
        for (expected, plant) in faults {
            let (mut ledger, row) = busy();
            plant(&mut ledger, row);
            let found: Vec<About> = ledger
                .audit()
                .unwrap()
                .into_iter()
                .map(|finding| (finding.group, finding.page.map(|page| page.0), finding.row.map(|row| row.0)))
                .collect();
            for about in expected {
                assert!(found.contains(about), "{about:?} is not in {found:?}");
            }
        }
    }

    /// Scenario 8: committed beyond allocated is refused at the next claim, naming the request and both numbers.
    #[test]
    fn scenario_08_a_claim_on_a_corrupt_row_is_refused() {
        let (mut ledger, row) = busy();
        ledger.rows.resolved[row.at()] = 16;
        ledger.rows.drafted[row.at()] = 16;
        let before = format!("{ledger:?}");
        let error = ledger.prepare_decode(&[row.0], &[1], true).unwrap_err().to_string();
        assert!(error.contains("request-7") && error.contains("17 > allocated_len 16"), "{error}");
        assert_eq!(before, format!("{ledger:?}"));
    }

    /// A round that the row does not have in flight cannot be taken from it.
    #[test]
    fn a_resolve_of_a_corrupt_row_is_refused() {
        let (mut ledger, row) = busy();
        ledger.rows.in_flight[row.at()] = 0;
        let before = format!("{ledger:?}");
        let error = ledger.resolve(2, &[1]).unwrap_err().to_string();
        assert_eq!(error, "resolve of step 2: the oldest round of row 1 (request-7) is step 0");
        assert_eq!(before, format!("{ledger:?}"));
    }

    /// Scenario 4: no claim passes the end of the row, whatever the lengths say.
    #[test]
    fn scenario_04_a_claim_past_the_row_width_is_refused() {
        let (mut ledger, row) = busy();
        let width = ledger.row_width(0).unwrap();
        ledger.rows.hi[row.at()] = width as i32 - 3;
        let before = format!("{ledger:?}");
        let error = ledger.prepare_decode(&[row.0], &[1], true).unwrap_err();
        assert_eq!(error, Error::RowOverflow { group: "kv".into(), row: row.at(), need: width + 1, width });
        assert_eq!(before, format!("{ledger:?}"));
    }

    /// Two faults in opposite directions do not cancel out.
    #[test]
    fn two_corrupt_rows_are_refused_as_one_is() {
        let (mut ledger, row) = busy();
        let other = ledger.admit(None).unwrap();
        let step = ledger.prepare_extend(&[other.0], &[10], true).unwrap().step;
        ledger.launch(step).unwrap();
        let width = ledger.row_width(0).unwrap() as i32;
        // The row with a round in flight claims from 16 on, the end of its pages, or from beyond it.
        let plants: [(i32, [i32; 2], &str); 4] = [
            (15, [width - 3; 2], "row 1 overflows"),
            (15, [width - 4, width - 3], "row 2 in group kv: kv_committed_len 15 > allocated_len 12"),
            (17, [18; 2], "kv_committed_len 18 > allocated_len 16"),
            (17, [width - 3; 2], "kv_committed_len 18 > allocated_len 16"),
        ];
        for (resolved, his, expected) in plants {
            let mut ledger = ledger.clone();
            for (row, hi) in [row, other].into_iter().zip(his) {
                ledger.rows.resolved[row.at()] = resolved;
                ledger.rows.drafted[row.at()] = resolved;
                ledger.rows.hi[row.at()] = hi;
            }
            let error = ledger.prepare_decode(&[row.0, other.0], &[1, 1], true).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// A page that is not held cannot be shared either.
    #[test]
    fn a_foreign_page_is_never_shared() {
        let (mut ledger, row) = busy();
        ledger.complete(1).unwrap();
        ledger.groups[0].pool.release(Page(2), row, 0, 0, Verb::Trim).unwrap();
        ledger.groups[0].pool.take(Row(2), 9, Verb::PrepareDecode).unwrap();
        let before = format!("{ledger:?}");
        let error = ledger.pin_prefix(row, 10).unwrap_err();
        assert!(matches!(&error, Error::PageState { page: 2, owner, .. } if owner.contains("row 2")), "{error}");
        assert_eq!(before, format!("{ledger:?}"));
    }

    /// If another row owns a page in the row's table, the release stops before anything changes.
    #[test]
    fn a_foreign_page_is_never_given_back() {
        let (mut ledger, row) = busy();
        ledger.groups[0].pool.release(Page(3), row, 0, 0, Verb::Trim).unwrap();
        ledger.groups[0].pool.take(Row(2), 9, Verb::PrepareDecode).unwrap();
        let before = format!("{ledger:?}");
        for refused in [ledger.finish(row), ledger.trim(row, 5).map(drop)] {
            let Err(Error::PageState { page, state, owner, .. }) = refused else { panic!("{refused:?}") };
            assert_eq!((page, state.as_str()), (3, "owned"));
            assert!(owner.contains("row 2"), "{owner}");
        }
        assert_eq!(before, format!("{ledger:?}"));
    }
}
