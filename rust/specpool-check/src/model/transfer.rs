//! Rows that move to another ledger: `export` and `import_row`.

use super::{Holding, Model, ModelPrefix, Outcome, Refusal};

impl Model {
    pub(crate) fn export(&mut self, row: i32) -> Outcome {
        let at = self.live(row)?;
        let state = self.rows[at].clone();
        if state.resolved == 0 {
            return Err(Refusal::Shape);
        }
        self.check_still(at)?;
        let len = self.check_fork(at)?;
        if len == 0 {
            return Err(Refusal::NotReady);
        }
        let mut groups = Vec::new();
        for (group, held) in state.groups.iter().enumerate() {
            let (columns, page_size) = (self.needed_columns(group, len), self.groups[group].page_size);
            let end = self.window_columns(group, len).end * page_size;
            let table = columns.iter().map(|column| (*column, held.table[column])).collect();
            let evicted = self.evict_to(group, len);
            let holding = Holding { allocated: end, protected: end, evicted, table, ..Holding::default() };
            self.shared.extend(holding.pages().map(|page| (group, page)));
            groups.push(holding);
        }
        let (drafted, slot) = (state.drafted.min(len), state.state.slot);
        self.prefixes.insert(self.next_prefix, ModelPrefix { len, drafted, slot, groups });
        self.next_prefix += 1;
        self.give_back(row)?;
        Ok(self.next_prefix as i64 - 1)
    }

    pub(crate) fn import_row(&mut self, len: i32, drafted: i32) -> Outcome {
        if len < 1 || len > self.max_context_len || drafted < 0 || drafted > len {
            return Err(Refusal::Shape);
        }
        self.check_free_row()?;
        let columns: Vec<_> = (0..self.groups.len()).map(|group| self.needed_columns(group, len)).collect();
        let need: Vec<usize> = columns.iter().map(Vec::len).collect();
        self.check_pages(&need, &vec![0; self.groups.len()])?;
        self.check_free_slot()?;
        let row = self.take_row();
        self.take_state(row, len);
        for (group, columns) in columns.into_iter().enumerate() {
            let (page_size, window) = (self.groups[group].page_size, self.window_columns(group, len));
            let (allocated, evicted) = (window.end * page_size, window.start * page_size);
            let table = columns.into_iter().map(|column| (column, self.new_page())).collect();
            self.rows[row].groups[group] = Holding { allocated, evicted, table, ..Holding::default() };
        }
        (self.rows[row].resolved, self.rows[row].drafted) = (len, drafted);
        Ok(row as i64)
    }
}
