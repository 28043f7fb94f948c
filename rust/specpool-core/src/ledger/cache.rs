//! The prefix cache: `index`, `match_prefix`, `admit_cached` and `forget`; and the eviction of what nobody uses.
//!
//! The index (`state::prefix_index`) maps tokens to pages, and is one holder of each of its pages.

use super::Ledger;
use super::share::{Start, StartLens};
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::log::call::{Call, Given};
use crate::memory::{collected, gathered, room, with_room};
use crate::state::group::GroupState;
use crate::state::prefix_index::{NONE, PrefixIndex};
use crate::verb::Verb;

/// Most bytes of a salt.
pub(crate) const MAX_SALT: usize = 256;

/// What [`Ledger::match_prefix`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMatch {
    /// The length c of the row that [`Ledger::admit_cached`] would give.
    pub len: i32,
    /// Tokens whose KV the index knows, at least `len`: a later text that begins with these finds their state if the
    /// extend of this one ends one token behind them and keeps its lane.
    pub known: i32,
    /// Per group: pages that the row would share.
    pub shared: Vec<usize>,
    /// Per group: how many pages the call takes from those that can be handed out: the cached ones that it uses, and
    /// one for a tail.
    pub taken: Vec<usize>,
}

/// One entry of the prefix index, for pictures and tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indexed<'a> {
    /// The salt.
    pub salt: &'a [u8],
    /// Tokens before the entry.
    pub start: usize,
    /// The entry's tokens.
    pub tokens: &'a [i32],
    /// How many of them have draft KV.
    pub drafted: usize,
    /// Per group: its pages, 0 for one that was given up.
    pub pages: Vec<&'a [i32]>,
}

/// What the index knows of some tokens.
struct Hit {
    /// Whole entries from the start on, and perhaps one that agrees with only some of the tokens.
    path: Vec<u32>,
    /// Tokens that agree.
    len: i32,
    /// Draft KV is valid below this.
    drafted: i32,
    /// Tokens that agree, wherever the row must begin.
    known: i32,
    /// The state slot that contains `len` tokens; page 0 if there is none.
    slot: Page,
}

impl Hit {
    /// The page of a column in the group; page 0 if it was given up.
    fn page(&self, index: &PrefixIndex, group: usize, column: usize) -> Page {
        let per_span = index.columns(group, index.span());
        Page(index.pages(self.path[column / per_span], group)[column % per_span])
    }
}

/// What `index` does with a row's tokens in one span.
enum Step {
    /// An entry has them all; `bool`: it is a whole entry, so the next span follows behind it.
    Known(u32, bool),
    /// A tail has the first of them.
    Grow(u32),
    /// No entry has them; a new one belongs there.
    Add(usize),
}

impl Ledger {
    /// Notes that the row's KV of `tokens` can serve later requests. The tokens are those of the row from its start
    /// on; their KV must be final. Whoever indexes tokens first keeps its pages in the index; a row that computed the
    /// same tokens keeps its own. Returns how many tokens the index knows now: all of them, unless a page of the row
    /// is in the index already as part of other tokens. The row's indexed pages become read-only up to the last token.
    ///
    /// An entry without draft KV gives way to a row that has it. O(tokens).
    ///
    /// With a state group the index also takes the states that the row's soft marks keep, and the row's own, if they
    /// contain no more than the tokens that it knows and no unlaunched step writes them. A state that a launched step
    /// still writes serves nobody before this step is complete. Whoever indexes a state of a text first keeps its slot
    /// there.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (unknown row; more tokens
    /// than `resolved_len`; none; a salt of more than 256 bytes), [`Error::NotReady`] (a step that is not complete
    /// writes these tokens; a page copy into the row is not finished), [`Error::PageState`], [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14];
    /// assert_eq!(ledger.index(row, &prompt, b"")?, 10);
    /// ledger.finish(row)?;
    /// assert_eq!(ledger.cached_pages(0)?, 3); // they stay until somebody needs the room
    ///
    /// let again = ledger.admit_cached(&prompt, b"", None, true, Some("request-2"))?;
    /// assert_eq!(ledger.resolved_len()[again.at()], 9); // the last token must be computed: it gives the root
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn index(&mut self, row: Row, tokens: &[i32], salt: &[u8]) -> Result<i32> {
        self.gate()?;
        let row = self.rows.check_live(row.0)?;
        self.check_index(row, tokens, salt)?;
        let span = self.index.span();
        // The whole entries that are there already.
        let root = self.index.root(salt);
        let path = self.whole_entries(root, tokens)?;
        let mut parent = path.last().copied().unwrap_or(root);
        self.index.make_room(parent, tokens.chunks(span).skip(path.len()).len())?;
        if let Some(states) = &mut self.states {
            states.kept.make_room_to_index()?;
        }
        self.recorder.make_room(tokens.len() + salt.len(), None)?;
        let kept_salt = collected(salt.iter().copied(), "a salt")?.into_boxed_slice();

        // Nothing is refused from here on.
        let mut own_end = 0;
        for (at, &entry) in path.iter().enumerate() {
            if self.refresh(row, entry, at * span, span) {
                own_end = (at + 1) * span;
            }
        }
        let mut len = path.len() * span;
        if parent == NONE {
            parent = self.index.add_root(kept_salt);
        }
        while len < tokens.len() {
            let piece = &tokens[len..tokens.len().min(len + span)];
            let entry = match self.next_step(parent, piece) {
                Step::Known(entry, _) => {
                    self.touch(entry);
                    own_end = if self.refresh(row, entry, len, piece.len()) { len + piece.len() } else { own_end };
                    entry
                }
                Step::Grow(entry) if self.can_hold(row, entry, len, piece.len()) => {
                    let before = self.index.len(entry);
                    self.index.grow(entry, piece);
                    self.take_pages(row, entry, len, before);
                    own_end = len + piece.len();
                    entry
                }
                Step::Add(place) if self.can_hold(row, NONE, len, piece.len()) => {
                    let entry = self.index.add(parent, place, piece);
                    self.take_pages(row, entry, len, 0);
                    own_end = len + piece.len();
                    entry
                }
                _ => break,
            };
            (len, parent) = (len + piece.len(), entry);
        }
        self.protect(row, own_end);
        for &entry in path.iter().rev() {
            self.touch(entry);
        }
        if self.states.is_some() {
            self.take_states(row, parent, &tokens[..len]);
        }
        self.prune(parent, Verb::Index);
        let call = Call::Index { row: row.0, tokens: tokens.into(), salt: salt.into() };
        self.note(&call, &Given::Length(len as i32), None);
        Ok(len as i32)
    }

    fn check_index(&self, row: Row, tokens: &[i32], salt: &[u8]) -> Result<()> {
        let (name, resolved) = (self.rows.describe(row), self.rows.resolved[row.at()]);
        if tokens.is_empty() || tokens.len() > resolved as usize {
            let given = tokens.len();
            return Err(Error::Shape(format!("index of {name}: between 1 and {resolved} tokens, got {given}")));
        }
        check_salt(salt)?;
        if let Some((step, from)) = self.first_written(row).filter(|&(_, from)| (from as usize) < tokens.len()) {
            return Err(Error::NotReady(format!(
                "index of {name}: step {step} writes from position {from} on and is not complete, got {} tokens",
                tokens.len()
            )));
        }
        self.check_no_copy_into(row, Verb::Index.name())?;
        for (at, group) in self.groups.iter().enumerate() {
            let bounds = group.bounds(row);
            let last = tokens.len().div_ceil(group.page_size as usize).min(bounds.end);
            let checked = group.check_columns(row, group.columns_in(bounds.start, 0..last));
            checked.map_err(|record| self.page_error(at, record))?;
        }
        Ok(())
    }

    /// The whole entries that hold the first spans of `tokens`.
    fn whole_entries(&self, root: u32, tokens: &[i32]) -> Result<Vec<u32>> {
        let span = self.index.span();
        let mut parent = root;
        let known = tokens.chunks_exact(span).map_while(|piece| {
            match self.next_step(parent, piece) {
                Step::Known(entry, true) => parent = entry,
                _ => return None,
            }
            Some(parent)
        });
        gathered(known, "the entries of a prefix")
    }

    fn next_step(&self, parent: u32, piece: &[i32]) -> Step {
        let (index, nearest) = self.index.nearest_child(parent, piece);
        match nearest {
            Some((child, agree)) if agree == piece.len() => Step::Known(child, agree == self.index.span()),
            Some((child, agree)) if agree == self.index.len(child) => Step::Grow(child),
            _ => Step::Add(index),
        }
    }

    /// Tokens of the row with draft KV, of `len` from `start` on.
    fn row_drafted(&self, row: Row, start: usize, len: usize) -> usize {
        (self.rows.drafted[row.at()] as usize).saturating_sub(start).min(len)
    }

    /// Whether the row has the pages of `len` tokens from `start` on, and no entry holds one of them, but for `entry` at
    /// the same place.
    fn can_hold(&self, row: Row, entry: u32, start: usize, len: usize) -> bool {
        self.groups.iter().enumerate().all(|(at, group)| {
            (0..self.index.columns(at, len)).all(|column| match row_page(row, group, start, column) {
                Page::SINK => group.spec.window.is_some(),
                page => match group.pool.entry_of(page) {
                    NONE => true,
                    holder => holder == entry && self.index.pages(entry, at).get(column) == Some(&page.0),
                },
            })
        })
    }

    /// Puts the row's pages in place of the entry's. The first `before` tokens of the entry had pages until now.
    fn take_pages(&mut self, row: Row, entry: u32, start: usize, before: usize) {
        let completed = self.steps.completed();
        let drafted = self.row_drafted(row, start, self.index.len(entry));
        let had_drafted = self.index.drafted(entry);
        for at in 0..self.groups.len() {
            for column in 0..self.index.columns(at, self.index.len(entry)) {
                let page = row_page(row, &self.groups[at], start, column);
                let was = Page(self.index.pages(entry, at)[column]);
                // A page that the row has given up may stay, if the new tokens leave it as it was.
                let end = (column + 1) * self.groups[at].page_size as usize;
                if page == was || page == Page::SINK && end <= before && had_drafted >= drafted.min(end) {
                    continue;
                }
                let pool = &mut self.groups[at].pool;
                if was != Page::SINK {
                    pool.unindex(was, completed, Verb::Index);
                }
                if page != Page::SINK {
                    pool.index(page, entry, Verb::Index);
                }
                self.index.set_page(entry, at, column, page);
            }
        }
        self.index.set_drafted(entry, drafted);
    }

    /// Gives an entry what the row has and it lacks: draft KV, and pages below windows. `covered` of the entry's tokens
    /// are the row's. Returns whether the entry holds a page of the row there.
    fn refresh(&mut self, row: Row, entry: u32, start: usize, covered: usize) -> bool {
        let len = self.index.len(entry);
        let (has, promised) = (self.row_drafted(row, start, len), self.index.drafted(entry));
        let has_all = covered == len && has >= promised;
        if has_all && has > promised && self.can_hold(row, entry, start, len) {
            self.take_pages(row, entry, start, len);
        }
        let mut is_own = false;
        for at in 0..self.groups.len() {
            for column in 0..self.index.columns(at, covered) {
                let page = row_page(row, &self.groups[at], start, column);
                let was = Page(self.index.pages(entry, at)[column]);
                let pool = &mut self.groups[at].pool;
                let is_missing = was == Page::SINK && page != Page::SINK;
                if has_all && is_missing && pool.entry_of(page) == NONE {
                    pool.index(page, entry, Verb::Index);
                    self.index.set_page(entry, at, column, page);
                    is_own = true;
                }
                is_own |= page == was && page != Page::SINK;
            }
        }
        is_own
    }

    /// Takes the row's states of up to `tokens` into the index. `entry` has the last of the tokens.
    #[inline(never)]
    fn take_states(&mut self, row: Row, entry: u32, tokens: &[i32]) {
        let completed = self.steps.completed();
        let mark = |ledger: &Self, place| ledger.states.as_ref()?.kept.marks_of(row).nth(place);
        let mut place = 0;
        while let Some((slot, len)) = mark(self, place) {
            if !self.take_state(row, (slot, len), entry, tokens) {
                place += 1;
            } else if let Some(states) = &mut self.states {
                states.end_soft_mark(row, slot, completed, Verb::Index);
            }
        }
        if let Some(states) = &self.states {
            let held = (states.slot_of(row), states.len[row.at()]);
            self.take_state(row, held, entry, tokens);
        }
    }

    /// Takes a state of the row into the index, if it is one of up to `tokens` and nothing unlaunched writes it. Whoever
    /// indexed a state of the text first keeps its slot there. Returns whether the index has the state.
    fn take_state(&mut self, row: Row, (slot, len): (Page, i32), entry: u32, tokens: &[i32]) -> bool {
        let is_unwritten = self.unlaunched_folds(row).any(|fold| fold.dst == slot);
        let Self { states: Some(states), index, .. } = self else { return false };
        if len == 0 || len as usize > tokens.len() || is_unwritten {
            return false;
        }
        let span = index.span();
        let (last, level) = ((tokens.len() - 1) / span, (len as usize - 1) / span);
        let holder = (level..last).fold(entry, |entry, _| index.parent(entry));
        let piece = &tokens[level * span..len as usize];
        let has_state = |child: u32, agree: usize| {
            let is_there = agree == piece.len() && states.kept.of_entry(child, len).any(|state| state.len == len);
            if is_there { agree } else { 0 }
        };
        if let Some((child, _)) = index.nearest_by(index.parent(holder), piece, has_state) {
            let indexed = states.kept.of_entry(child, len).next().map_or(Page::SINK, |state| state.slot);
            states.pool.touch(indexed);
        } else if !states.is_indexed(slot) {
            // Under another salt the slot may be there: it is in the index once.
            states.index_state(holder, len, slot, Verb::Index);
        }
        true
    }

    /// Makes the row's pages up to `end` tokens read-only there.
    fn protect(&mut self, row: Row, end: usize) {
        for group in &mut self.groups {
            let protected = &mut group.protected[row.at()];
            *protected = (*protected).max(end as i32);
            let to = end.div_ceil(group.page_size as usize);
            let bounds = group.bounds(row);
            for column in group.columns_in(bounds.start, 0..to.min(bounds.end)) {
                group.pool.freeze(Page(group.table.row(row)[column]));
            }
            for at in 0..group.kept(row).len() {
                let kept_page = group.kept(row)[at];
                if (kept_page.column as usize) < to {
                    group.pool.freeze(kept_page.page);
                }
            }
        }
    }

    /// Makes the index forget what the row may write over after a cut to `len` tokens: what is behind them in a page
    /// that only the row and the index hold.
    pub(super) fn shorten_index(&mut self, row: Row, len: i32, verb: Verb) {
        for at in 0..self.groups.len() {
            let group = &self.groups[at];
            if len >= group.protected[row.at()] || i64::from(len) % group.page_size == 0 {
                continue;
            }
            let Some(page) = group.indexed_alone(row, len) else { continue };
            let (entry, page_size) = (group.pool.entry_of(page), group.page_size as usize);
            // A cache outside may have put the page elsewhere in the row than it is in the entry.
            let Some(column) = self.index.pages(entry, at).iter().position(|&other| other == page.0) else { continue };
            self.shorten(entry, column * page_size + len as usize % page_size, verb);
        }
    }

    /// Cuts an entry to its first `len` tokens, and drops what is behind it.
    fn shorten(&mut self, entry: u32, len: usize, verb: Verb) {
        if len >= self.index.len(entry) {
            return;
        }
        while let leaf = self.index.leaf_below(entry)
            && leaf != entry
        {
            self.drop_entry(leaf, verb);
        }
        let prefix_tokens = &self.index.tokens(entry)[..len];
        let siblings = self.index.children(self.index.parent(entry));
        if siblings.iter().any(|&other| other != entry && self.index.tokens(other).starts_with(prefix_tokens)) {
            self.drop_entry(entry, verb);
            return;
        }
        let completed = self.steps.completed();
        if let Some(states) = &mut self.states {
            let end = (self.index.start(entry) + len) as i32;
            states.leave_entry(entry, end, None, completed, verb);
        }
        for (at, group) in self.groups.iter_mut().enumerate() {
            for column in self.index.columns(at, len)..self.index.columns(at, self.index.len(entry)) {
                let page = Page(self.index.pages(entry, at)[column]);
                if page != Page::SINK {
                    group.pool.unindex(page, completed, verb);
                    self.index.set_page(entry, at, column, Page::SINK);
                }
            }
        }
        self.index.shorten(entry, len);
    }

    /// Returns what [`admit_cached`](Ledger::admit_cached) with the same arguments would find. It changes nothing.
    /// O(tokens).
    ///
    /// # Errors
    /// [`Error::Shape`] as `admit_cached`, [`Error::OutOfMemory`].
    pub fn match_prefix(
        &self,
        tokens: &[i32],
        salt: &[u8],
        limit: Option<i32>,
        needs_draft: bool,
    ) -> Result<PrefixMatch> {
        let hit = self.hit(tokens, salt, limit, needs_draft)?;
        let (mut shared, mut taken) = (with_room(self.groups.len(), "a hit")?, with_room(self.groups.len(), "a hit")?);
        for (start, group) in self.starts(&hit)?.iter().zip(&self.groups) {
            let of_hit = start.shared.iter().chain(&start.tail);
            let cached = of_hit.filter(|&&page| group.pool.is_cached(page)).count();
            shared.push(start.shared.len());
            taken.push(cached + usize::from(start.tail.is_some()));
        }
        Ok(PrefixMatch { len: hit.len, known: hit.known, shared, taken })
    }

    /// Returns how many of the tokens, up to `limit`, have their KV in the index: `known` of
    /// [`match_prefix`](Ledger::match_prefix). O(tokens).
    ///
    /// # Errors
    /// [`Error::Shape`] as `admit_cached`, [`Error::OutOfMemory`].
    pub fn known_prefix(&self, tokens: &[i32], salt: &[u8], limit: Option<i32>) -> Result<i32> {
        Ok(self.hit(tokens, salt, limit, false)?.known)
    }

    /// Returns the state slot that [`admit_cached`](Ledger::admit_cached) would share, and the tokens that it contains;
    /// page 0 and no tokens if there is none. With the length less one as the next `limit` it walks the
    /// states of a text. O(tokens).
    ///
    /// # Errors
    /// [`Error::Shape`] as `admit_cached`, [`Error::OutOfMemory`].
    pub fn match_state(&self, tokens: &[i32], salt: &[u8], limit: Option<i32>) -> Result<(Page, i32)> {
        let hit = self.hit(tokens, salt, limit, false)?;
        Ok(if hit.slot == Page::SINK { (Page::SINK, 0) } else { (hit.slot, hit.len) })
    }

    /// Takes a free row that begins with the KV of the longest indexed beginning of `tokens` under the salt, up to
    /// `limit` tokens (all but the last by default, because the last one gives the root). The row shares whole pages;
    /// a partly used page is copied (the next prepared step carries the copy), so a hit ends at any token. If a window
    /// below that length is not held, the length goes back to one where it is. With `needs_draft` it goes back to where
    /// draft KV is valid. With a state group it goes back to the longest state in the index whose last writer is
    /// complete, and the row shares that slot. A row without a hit is an empty one. The row has no root until an extend
    /// of it has launched. O(tokens).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (a limit outside `0..=` the number of tokens, a salt of more
    /// than 256 bytes), [`Error::OutOfRows`], [`Error::OutOfPages`] (no page for the tail), [`Error::OutOfMemory`].
    pub fn admit_cached(
        &mut self,
        tokens: &[i32],
        salt: &[u8],
        limit: Option<i32>,
        needs_draft: bool,
        tag: Option<&str>,
    ) -> Result<Row> {
        self.gate()?;
        let hit = self.hit(tokens, salt, limit, needs_draft)?;
        let limit = self.limit(tokens, limit)?;
        let lens = StartLens { len: hit.len, drafted: hit.drafted, slot: hit.slot };
        let row = self.new_row(self.starts(&hit)?, &lens, tag, limit + salt.len(), Verb::AdmitCached)?;
        let (tokens, salt, limit) = (tokens[..limit].into(), salt.into(), Some(limit as i32));
        self.note(&Call::AdmitCached { tokens, salt, needs_draft, limit }, &Given::Row(row), tag);
        Ok(row)
    }

    /// Gives up everything that is indexed under the salt, or everything. Rows that share the pages keep them.
    /// O(entries).
    ///
    /// # Errors
    /// [`Error::Shape`] for a salt of more than 256 bytes.
    pub fn forget(&mut self, salt: Option<&[u8]>) -> Result<()> {
        self.gate()?;
        salt.map_or(Ok(()), check_salt)?;
        self.recorder.make_room(salt.map_or(0, <[u8]>::len), None)?;
        while let Some(root) = self.index.any_root(salt) {
            let leaf = self.index.leaf_below(root);
            self.drop_entry(leaf, Verb::Forget);
        }
        let call = salt.map_or(Call::ForgetAll {}, |salt| Call::Forget { salt: salt.into() });
        self.note(&call, &Given::Nothing(()), None);
        Ok(())
    }

    fn limit(&self, tokens: &[i32], limit: Option<i32>) -> Result<usize> {
        let max_len = tokens.len().min(self.max_context_len as usize);
        match limit {
            None => Ok(tokens.len().saturating_sub(1).min(max_len)),
            Some(limit) if limit >= 0 && limit as usize <= max_len => Ok(limit as usize),
            Some(limit) => Err(Error::Shape(format!("the limit of a prefix must be in [0, {max_len}], got {limit}"))),
        }
    }

    fn hit(&self, tokens: &[i32], salt: &[u8], limit: Option<i32>, needs_draft: bool) -> Result<Hit> {
        check_salt(salt)?;
        let limit = self.limit(tokens, limit)?;
        let root = self.index.root(salt);
        let mut path = self.whole_entries(root, &tokens[..limit])?;
        let mut len = path.len() * self.index.span();
        let parent = path.last().copied().unwrap_or(root);
        if let (_, Some((child, agree))) = self.index.nearest_child(parent, &tokens[len..limit]) {
            room(&mut path, 1, "the entries of a prefix")?;
            path.push(child);
            len += agree;
        }
        let drafts = |&entry: &u32| self.index.drafted(entry) == self.index.len(entry);
        let all_drafted = path.iter().take_while(|entry| drafts(entry)).count();
        let behind = all_drafted * self.index.span();
        let mut drafted = len;
        if all_drafted < path.len() {
            if needs_draft {
                // Another text may agree with fewer tokens, and have draft KV of more.
                path.truncate(all_drafted);
                let before = path.last().copied().unwrap_or(root);
                drafted = behind;
                if let Some((nearest, num)) = self.index.nearest_drafted(before, &tokens[behind..limit]) {
                    path.push(nearest);
                    drafted += num;
                }
            } else {
                drafted = (behind + self.index.drafted(path[all_drafted])).min(len);
            }
        }
        let known = len as i32;
        let len = if needs_draft { drafted as i32 } else { known };
        let mut hit = Hit { path, len, drafted: drafted as i32, known, slot: Page::SINK };
        if self.states.is_some() {
            self.go_back_to_a_state(&mut hit, root, tokens);
        } else {
            while let Some(shorter) = self.next_shorter(&hit) {
                hit.len = shorter;
            }
        }
        hit.drafted = hit.drafted.min(hit.len);
        Ok(hit)
    }

    /// Shortens the hit to the longest state that serves, and whose windows are held.
    #[inline(never)]
    fn go_back_to_a_state(&self, hit: &mut Hit, root: u32, tokens: &[i32]) {
        loop {
            (hit.slot, hit.len) = self.longest_state(hit, root, tokens).unwrap_or((Page::SINK, 0));
            if hit.len == 0 || self.next_shorter(hit).is_none() {
                return;
            }
            hit.len -= 1;
        }
    }

    /// The slot of the longest state of up to the hit's length that serves, and its length.
    fn longest_state(&self, hit: &Hit, root: u32, tokens: &[i32]) -> Option<(Page, i32)> {
        let states = self.states.as_ref().filter(|states| !states.kept.indexed.is_empty())?;
        let (span, completed) = (self.index.span(), self.steps.completed());
        for (level, piece) in tokens[..hit.len as usize].chunks(span).enumerate().rev() {
            let parent = level.checked_sub(1).map_or(root, |before| hit.path[before]);
            let start = (level * span) as i32;
            let longest = |child: u32, agree: usize| {
                let of_entry = states.kept.of_entry(child, start + agree as i32);
                let mut serving = of_entry.filter(|state| states.kept.writer(state.slot).step <= completed);
                serving.next().copied()
            };
            let measure = |child, agree| longest(child, agree).map_or(0, |state| (state.len - start) as usize);
            if let Some((child, len)) = self.index.nearest_by(parent, piece, measure) {
                return longest(child, len).map(|state| (state.slot, state.len));
            }
        }
        None
    }

    /// A shorter length to go back to, if a page of a window below the hit's length was given up.
    fn next_shorter(&self, hit: &Hit) -> Option<i32> {
        let shorter = |(at, group): (usize, &GroupState)| {
            group.spec.window?;
            let is_missing = |&column: &usize| hit.page(&self.index, at, column) == Page::SINK;
            let missing = group.needed_columns(hit.len).rev().find(is_missing)?;
            Some((missing as i64 * group.page_size) as i32)
        };
        self.groups.iter().enumerate().filter_map(shorter).min()
    }

    /// What a row of the hit's length starts with, per group.
    fn starts(&self, hit: &Hit) -> Result<Vec<Start>> {
        let mut starts = with_room(self.groups.len(), "a row")?;
        for (at, group) in self.groups.iter().enumerate() {
            let page = |column: usize| hit.page(&self.index, at, column);
            starts.push(Self::start(group, group.evict_to(hit.len), hit.len, page)?);
        }
        Ok(starts)
    }

    /// Gives up cached pages of the group until `need` pages are free, as far as there are any: the least recently
    /// used first, and an entry only after those behind it. In a window group only the page itself is given up, because
    /// the entry's other pages can still serve.
    pub(super) fn evict_cached(&mut self, at: usize, need: usize, verb: Verb) {
        let completed = self.steps.completed();
        while self.groups[at].pool.num_free() < need {
            let Some(page) = self.groups[at].pool.oldest_cached() else { return };
            let entry = self.groups[at].pool.entry_of(page);
            self.num_evictions += 1;
            if self.groups[at].spec.window.is_none() {
                self.drop_entry(self.index.leaf_below(entry), verb);
                continue;
            }
            let column = self.index.pages(entry, at).iter().position(|&other| other == page.0);
            self.groups[at].pool.unindex(page, completed, verb);
            if let Some(column) = column {
                self.index.set_page(entry, at, column, Page::SINK);
            }
            self.prune(entry, verb);
        }
    }

    /// Gives up an entry without children, and the entries before it that serve nothing without it.
    fn drop_entry(&mut self, entry: u32, verb: Verb) {
        let completed = self.steps.completed();
        for (at, group) in self.groups.iter_mut().enumerate() {
            for &page in self.index.pages(entry, at).iter().rev().filter(|&&page| page > 0) {
                group.pool.unindex(Page(page), completed, verb);
            }
        }
        let parent = self.index.parent(entry);
        self.leave_entry(entry, verb);
        self.index.remove(entry);
        self.prune(parent, verb);
    }

    /// Removes the entry if it has neither pages nor children, then the one before it, and so on to the root.
    fn prune(&mut self, mut entry: u32, verb: Verb) {
        while entry != NONE && self.index.children(entry).is_empty() && self.index.is_bare(entry) {
            let parent = self.index.parent(entry);
            self.leave_entry(entry, verb);
            self.index.remove(entry);
            entry = parent;
        }
    }

    /// Takes the states of an entry that goes out of the index, but for those whose text another entry has.
    fn leave_entry(&mut self, entry: u32, verb: Verb) {
        if let Some(states) = &mut self.states
            && states.kept.of_entry(entry, i32::MAX).next().is_some()
        {
            let start = self.index.start(entry) as i32;
            let sibling = self.index.nearest_sibling(entry).map(|(sibling, shared)| (sibling, start + shared as i32));
            states.leave_entry(entry, 0, sibling, self.steps.completed(), verb);
        }
    }

    /// Notes that the entry's pages were used.
    fn touch(&mut self, entry: u32) {
        for (at, group) in self.groups.iter_mut().enumerate() {
            self.index.pages(entry, at).iter().rev().for_each(|&page| group.pool.touch(Page(page)));
        }
    }

    /// Pages of the group that the prefix index alone holds. They can be handed out, after those that are free.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn cached_pages(&self, group: usize) -> Result<usize> {
        Ok(self.group(group)?.pool.num_cached())
    }

    /// Pages of the group that are shared: read-only, and held by rows or pinned prefixes. O(1).
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn shared_pages(&self, group: usize) -> Result<usize> {
        Ok(self.group(group)?.pool.num_shared())
    }

    /// Entries of the prefix index, their tokens, and how often an entry, or a page below a window, was given up to make
    /// room. O(1).
    #[must_use]
    pub fn index_size(&self) -> (usize, usize, u64) {
        (self.index.num_entries(), self.index.num_tokens(), self.num_evictions)
    }

    /// Bytes that the prefix index takes in memory. O(entries).
    #[must_use]
    pub fn index_bytes(&self) -> usize {
        self.index.num_bytes()
    }

    /// The entries of the prefix index: salts in order, entries before those behind them.
    pub fn index_entries(&self) -> impl Iterator<Item = Indexed<'_>> {
        let index = &self.index;
        index.salts().flat_map(move |(salt, root)| {
            let (mut last, mut depth) = (root, 0);
            index.below(root).map(move |entry| {
                while last != index.parent(entry) {
                    (last, depth) = (index.parent(last), depth - 1);
                }
                (last, depth) = (entry, depth + 1);
                Indexed {
                    salt,
                    start: (depth - 1) * index.span(),
                    tokens: index.tokens(entry),
                    drafted: index.drafted(entry),
                    pages: (0..self.groups.len()).map(|group| index.pages(entry, group)).collect(),
                }
            })
        })
    }

    /// Every page of the group that the prefix index holds, each with its entry.
    pub(crate) fn index_holders(&self, group: usize) -> impl Iterator<Item = (u32, Page)> + '_ {
        let pages = move |entry: u32| self.index.pages(entry, group).iter().map(move |&page| (entry, Page(page)));
        self.index.all().flat_map(pages).filter(|&(_, page)| page != Page::SINK)
    }
}

/// The row's page at a column of an entry that begins at `start` tokens; page 0 if the row does not hold it.
fn row_page(row: Row, group: &GroupState, start: usize, column: usize) -> Page {
    let column = start / group.page_size as usize + column;
    if group.is_held(row, column) { Page(group.table.row(row)[column]) } else { Page::SINK }
}

/// Refuses a salt that is too long.
///
/// # Errors
/// [`Error::Shape`] with both lengths.
pub fn check_salt(salt: &[u8]) -> Result<()> {
    if salt.len() <= MAX_SALT {
        return Ok(());
    }
    Err(Error::Shape(format!("a salt has at most {MAX_SALT} bytes, got {}", salt.len())))
}
