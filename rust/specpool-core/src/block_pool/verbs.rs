//! The verbs: `take`, `drop`, `put`, `keep`, `unkeep`, `forget`, `complete`. A refused call changes nothing.

use std::sync::Arc;

use super::log::BlockCall;
use super::{BlockPool, KEPT, OWNER, Tag};
use crate::error::{Error, Result};
use crate::ids::Page;
use crate::ledger::check_salt;
use crate::memory::{collected, room, text, with_room};
use crate::state::page_pool::PageState;
use crate::state::prefix_index::NONE;
use crate::verb::Verb;

impl BlockPool {
    /// Takes `count` blocks, which are returned, and holds those of `hold` once more (a hit of
    /// [`match_prefix`](Self::match_prefix), or blocks of another request that are shared). Both or neither. If free
    /// blocks do not suffice, cached ones are given up. `tag` names the request in errors and audits. O(blocks).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (no such block), [`Error::BlockState`] (a block of `hold` that
    /// nobody holds and that is not cached), [`Error::OutOfBlocks`], [`Error::OutOfMemory`].
    pub fn take(&mut self, count: usize, hold: &[i32], tag: Option<&str>) -> Result<Vec<i32>> {
        self.gate()?;
        let (free, cached) = (self.num_free(), self.num_cached() - self.num_cached_of("take", hold)?);
        if count > free + cached {
            return Err(Error::OutOfBlocks { need: count, free, cached, fenced: self.num_fenced() });
        }
        let mut blocks = with_room(count, "the blocks of a take")?;
        self.recorder.make_room(hold.len(), tag)?;
        if count == 0 {
            self.share_each(hold);
            self.note(&BlockCall::Take { count, hold: hold.into() }, &blocks, tag);
            return Ok(blocks);
        }
        let kept_tag = tag.map(|tag| text(tag, "a tag").map(|tag| Arc::new(Tag(tag)))).transpose()?;
        self.pool.make_room(count)?;
        let max_blocks = self.pool.num_mapped() + count;
        let num_marks = self.marks.len();
        room(&mut self.marks, max_blocks.saturating_sub(num_marks), "the marks of blocks")?;
        let keeps_tags = kept_tag.is_some() || !self.tags.is_empty();
        if keeps_tags {
            let num_tags = self.tags.len();
            room(&mut self.tags, max_blocks.saturating_sub(num_tags), "the tags of blocks")?;
        }

        // Nothing is refused from here on.
        self.share_each(hold);
        self.take_free(count, &mut blocks);
        while blocks.len() < count {
            self.evict();
            if self.take_free(1, &mut blocks) == 0 {
                break;
            }
        }
        let num_mapped = self.pool.num_mapped();
        self.marks.resize(num_mapped, 0);
        if keeps_tags {
            self.tags.resize(num_mapped.max(self.tags.len()), None);
            for &block in &blocks {
                let page = self.page_of_block(block);
                self.tags[page.at()].clone_from(&kept_tag);
            }
        }
        self.note(&BlockCall::Take { count, hold: hold.into() }, &blocks, tag);
        Ok(blocks)
    }

    /// Holds blocks once more that can be held.
    fn share_each(&mut self, blocks: &[i32]) {
        for &block in blocks {
            let page = self.page_of_block(block);
            let _ = self.pool.share(page, Verb::Take);
        }
    }

    /// Takes up to `count` free blocks; returns how many.
    fn take_free(&mut self, count: usize, blocks: &mut Vec<i32>) -> usize {
        let first = self.config.first_id as i32 - 1;
        self.pool.take_each(count, OWNER, 0, Verb::Take, |page| blocks.push(page.0 + first))
    }

    /// How often a page is held, the index not counted.
    fn refs_of(&self, page: Page) -> u32 {
        self.pool.seen(page).holders.saturating_sub(u32::from(self.pool.entry_of(page) != NONE))
    }

    /// How many different cached blocks are among `hold`, which must be held, cached, or fenced with known content.
    pub(super) fn num_cached_of(&mut self, verb: &str, hold: &[i32]) -> Result<usize> {
        let mut num_cached = 0;
        self.check_each(verb, hold, |pool, page, num_named| {
            let seen = pool.pool.seen(page);
            if seen.holders == 0 {
                return Err(pool.refusal(verb, page, "nobody holds it and it is not cached"));
            }
            num_cached += usize::from(seen.state == PageState::Cached && num_named == 0);
            Ok(())
        })?;
        Ok(num_cached)
    }

    /// Checks each block in turn. `check` also gets how often the call has named the block before; it refuses those
    /// that were never handed out.
    fn check_each(
        &mut self,
        verb: &str,
        blocks: &[i32],
        mut check: impl FnMut(&Self, Page, u32) -> Result<()>,
    ) -> Result<()> {
        let mut num_seen = 0;
        let outcome = blocks.iter().try_for_each(|&block| {
            let page = self.page(verb, block)?;
            check(self, page, self.marks.get(page.at()).copied().unwrap_or(0))?;
            self.marks[page.at()] += 1;
            num_seen += 1;
            Ok(())
        });
        for &block in &blocks[..num_seen] {
            let page = self.page_of_block(block);
            self.marks[page.at()] = 0;
        }
        outcome
    }

    /// The page of a block that the pool has.
    fn page_of_block(&self, block: i32) -> Page {
        Page(block - self.id(Page::SINK))
    }

    fn refusal(&self, verb: &str, page: Page, why: &str) -> Error {
        let (verb, why) = (verb.into(), why.into());
        let line = self.line(page);
        let state = line.state.to_string();
        let tag = line.tag.map_or_else(|| "none".into(), |tag| format!("{tag:?}"));
        let by = line.dropped_by.map_or_else(String::new, |name| format!(" by {name:?}"));
        Error::BlockState {
            verb,
            block: line.block,
            why,
            state,
            tag,
            last_verb: format!("{}{by}", line.last_verb).into(),
        }
    }

    /// Gives up cached blocks until one is free: the least recently used first, and what continues it before.
    fn evict(&mut self) {
        while self.pool.num_free() == 0 {
            let Some(page) = self.pool.oldest_cached() else { return };
            self.num_evictions += 1;
            match self.pool.entry_of(page) {
                KEPT => self.drop_kept(page, Verb::Take),
                entry => self.drop_entry(self.index.leaf_below(entry), Verb::Take),
            }
        }
    }

    fn drop_kept(&mut self, page: Page, verb: Verb) {
        self.num_kept -= 1;
        self.pool.unindex(page, self.completed, verb);
    }

    /// Makes the index forget an entry that nothing continues, and the root of its salt if it was the last.
    fn drop_entry(&mut self, entry: u32, verb: Verb) {
        let (page, parent) = (self.page_of(entry), self.index.parent(entry));
        self.pool.unindex(page, self.completed, verb);
        self.index.remove(entry);
        if self.index.parent(parent) == NONE && self.index.children(parent).is_empty() {
            self.index.remove(parent);
        }
    }

    /// Lets go of each block once. A block that nobody holds any more is free, or cached if its content is known. The
    /// last block of a call is given up first, because it is the end of a text. A block may be named as often as it is
    /// held. `after` is the last step that may still touch the blocks: they can be taken again once it is
    /// [complete](Self::complete). O(blocks); with a fence, `complete` looks at each fenced block.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (`after` without fencing; no such block),
    /// [`Error::BlockState`] (a block that is not held, or named more often than it is held).
    pub fn drop(&mut self, blocks: &[i32], after: Option<u64>) -> Result<()> {
        self.drop_by(blocks, after, None)
    }

    /// As [`drop`](Self::drop), with the name of the request that drops them. A later refusal of a block names it. If the
    /// machine has no memory for the name, it is left out.
    ///
    /// # Errors
    /// As [`drop`](Self::drop).
    pub fn drop_by(&mut self, blocks: &[i32], after: Option<u64>, tag: Option<&str>) -> Result<()> {
        self.gate()?;
        if let Some(step) = after.filter(|_| !self.config.fencing) {
            return Err(Error::Shape(format!("drop after step {step}: the pool was built without fencing")));
        }
        self.check_drop(blocks).map_err(|error| error.by(tag))?;
        self.recorder.make_room(blocks.len(), tag)?;
        self.note_dropper(blocks, tag);
        for &block in blocks.iter().rev() {
            let page = self.page_of_block(block);
            let _ = self.pool.release(page, OWNER, after.unwrap_or(0), self.completed, Verb::Drop);
        }
        self.note(&BlockCall::Drop { blocks: blocks.into(), after }, &[], tag);
        Ok(())
    }

    fn note_dropper(&mut self, blocks: &[i32], tag: Option<&str>) {
        let kept_tag = tag.and_then(|tag| text(tag, "a tag").ok()).map(|tag| Arc::new(Tag(tag)));
        let missing = self.pool.num_mapped().saturating_sub(self.droppers.len());
        if kept_tag.is_some() && room(&mut self.droppers, missing, "the tags of blocks").is_ok() {
            self.droppers.resize(self.pool.num_mapped().max(self.droppers.len()), None);
        }
        for &block in blocks {
            let page = self.page_of_block(block);
            if let Some(dropper) = self.droppers.get_mut(page.at()) {
                dropper.clone_from(&kept_tag);
            }
        }
    }

    fn check_drop(&mut self, blocks: &[i32]) -> Result<()> {
        self.check_each("drop", blocks, |pool, page, num_named| match pool.refs_of(page) {
            0 => Err(pool.refusal("drop", page, "nobody holds it")),
            refs if num_named >= refs => {
                let why = format!("it is named more often than the {refs} times that it is held");
                Err(pool.refusal("drop", page, &why))
            }
            _ => Ok(()),
        })
    }

    /// Notes what blocks hold: `blocks[i]` has the KV of the i-th `block_size` of `tokens`, under the salt. Blocks
    /// before `start` were noted by an earlier call, or come from a match. A last piece of fewer tokens is left out.
    /// The caller must hold the blocks, and must not write them again. Returns, for each whole block from `start` on,
    /// the block that the index has for these tokens: the same one, or another that was first. O(tokens).
    ///
    /// # Errors
    /// As [`put_behind`](Self::put_behind).
    pub fn put(&mut self, tokens: &[i32], blocks: &[i32], start: usize, salt: &[u8]) -> Result<Vec<i32>> {
        self.put_behind(None, tokens, blocks, start, salt)
    }

    /// As [`put`](Self::put), of the part of a text that lies behind the block `anchor`, which the index knows: tokens,
    /// blocks and `start` count from there. O(tokens).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (fewer blocks than the tokens fill, `start` behind them,
    /// a salt of more than 256 bytes, no such block), [`Error::BlockState`] (a block that is not held; one whose content
    /// the index knows as something else; one named twice; an anchor that the index does not know under this salt),
    /// [`Error::OutOfMemory`].
    pub fn put_behind(
        &mut self,
        anchor: Option<i32>,
        tokens: &[i32],
        blocks: &[i32],
        start: usize,
        salt: &[u8],
    ) -> Result<Vec<i32>> {
        self.gate()?;
        let size = self.block_size();
        let whole = tokens.len() / size;
        if whole > blocks.len() || start > blocks.len() {
            let (len, given) = (tokens.len(), blocks.len());
            let filled = if start > given { String::new() } else { format!("they fill {whole} blocks, ") };
            return Err(Error::Shape(format!("put of {len} tokens from block {start} on: {filled}{given} are given")));
        }
        check_salt(salt)?;
        let mut canonical = with_room(whole.saturating_sub(start), "the blocks of a put")?;
        if !self.config.caching {
            canonical.extend_from_slice(&blocks[start.min(whole)..whole]);
            return Ok(canonical);
        }
        let root = self.index.root(salt);
        let mut parent = anchor.map_or(Ok(root), |block| self.entry_at(block, root))?;
        let mut pieces = tokens.chunks_exact(size);
        let mut at = 0;
        let mut known = with_room(pieces.len(), "the entries of a put")?;
        while let Some(entry) = pieces.clone().next().and_then(|piece| self.child(parent, piece)) {
            pieces.next();
            self.check_put(blocks[at], entry, at >= start)?;
            if at >= start {
                canonical.push(self.id(self.page_of(entry)));
            }
            known.push(entry);
            (parent, at) = (entry, at + 1);
        }
        self.check_new(&blocks[at..whole])?;
        self.recorder.make_room(tokens.len() + blocks.len() + salt.len(), None)?;
        if at < whole {
            self.index.make_room(parent, whole - at)?;
            let kept_salt = collected(salt.iter().copied(), "a salt")?.into_boxed_slice();

            // Nothing is refused from here on.
            if parent == NONE {
                parent = self.index.add_root(kept_salt);
            }
            for (&block, piece) in blocks[at..whole].iter().zip(pieces) {
                let (index, _) = self.index.nearest_child(parent, piece);
                let entry = self.index.add(parent, index, piece);
                let page = self.page_of_block(block);
                self.pool.index(page, entry, Verb::Put);
                self.index.set_page(entry, 0, 0, page);
                parent = entry;
            }
            canonical.extend_from_slice(&blocks[at.max(start).min(whole)..whole]);
        }
        for &entry in known.iter().rev() {
            self.pool.touch(self.page_of(entry));
        }
        let (tokens, blocks, salt) = (tokens.into(), blocks.into(), salt.into());
        self.note(&BlockCall::Put { anchor, tokens, blocks, start, salt }, &canonical, None);
        Ok(canonical)
    }

    /// The entry of a block that ends the part of a text that the index knows under the root.
    fn entry_at(&self, block: i32, root: u32) -> Result<u32> {
        let page = self.page("put", block)?;
        let entry = self.pool.entry_of(page);
        let is_known = ![NONE, KEPT].contains(&entry);
        if is_known && self.index.root_of(entry) == root {
            return Ok(entry);
        }
        Err(self.refusal("put behind", page, "it is not known under this salt"))
    }

    /// Checks a block of tokens that the index knows as `entry`. It must be held if it is new.
    fn check_put(&self, block: i32, entry: u32, is_new: bool) -> Result<()> {
        let page = self.page("put", block)?;
        if ![NONE, entry].contains(&self.pool.entry_of(page)) {
            return Err(self.refusal("put", page, "it is known to hold other tokens"));
        }
        if is_new && self.refs_of(page) == 0 {
            return Err(self.refusal("put", page, "nobody holds it"));
        }
        Ok(())
    }

    /// Checks blocks that the index is to know: held, not known yet, all different.
    fn check_new(&mut self, blocks: &[i32]) -> Result<()> {
        self.check_each("put", blocks, |pool, page, num_named| {
            let line = pool.line(page);
            let why = match () {
                () if num_named > 0 => "it is named twice",
                () if line.refs == 0 => "nobody holds it",
                () if line.is_indexed => "it is known to hold other tokens",
                () => return Ok(()),
            };
            Err(pool.refusal("put", page, why))
        })
    }

    /// Notes that the caller's own index knows what the blocks hold: when nobody holds them any more they are cached, not
    /// free. `match_prefix` does not find them. A block that is kept already stays as it is. O(blocks).
    ///
    /// # Errors
    /// [`Error::Shape`] (no such block), [`Error::BlockState`] (a block that is not held, or that `put` has noted).
    pub fn keep(&mut self, blocks: &[i32]) -> Result<()> {
        self.gate()?;
        if !self.config.caching {
            return Ok(());
        }
        self.check_each("keep", blocks, |pool, page, _| match pool.pool.entry_of(page) {
            _ if pool.refs_of(page) == 0 => Err(pool.refusal("keep", page, "nobody holds it")),
            NONE | KEPT => Ok(()),
            _ => Err(pool.refusal("keep", page, "the pool's own index knows it")),
        })?;
        self.recorder.make_room(blocks.len(), None)?;
        for &block in blocks {
            let page = self.page_of_block(block);
            if self.pool.entry_of(page) == NONE {
                self.pool.index(page, KEPT, Verb::Keep);
                self.num_kept += 1;
            }
        }
        self.note(&BlockCall::Keep { blocks: blocks.into() }, &[], None);
        Ok(())
    }

    /// Undoes [`keep`](Self::keep): a block that nobody holds is free. A block that is not kept stays as it is.
    /// O(blocks).
    ///
    /// # Errors
    /// [`Error::Shape`] (no such block), [`Error::BlockState`] (a block that `put` has noted: see
    /// [`forget`](Self::forget)).
    pub fn unkeep(&mut self, blocks: &[i32]) -> Result<()> {
        self.gate()?;
        for &block in blocks {
            let page = self.page("unkeep", block)?;
            if ![NONE, KEPT].contains(&self.pool.entry_of(page)) {
                return Err(self.refusal("unkeep", page, "the pool's own index knows it"));
            }
        }
        self.recorder.make_room(blocks.len(), None)?;
        for &block in blocks {
            let page = self.page_of_block(block);
            if self.pool.entry_of(page) == KEPT {
                self.drop_kept(page, Verb::Unkeep);
            }
        }
        self.note(&BlockCall::Unkeep { blocks: blocks.into() }, &[], None);
        Ok(())
    }

    /// Makes the index forget what it knows under the salt, or everything, kept blocks too. Blocks that are held stay
    /// held. O(blocks forgotten); everything: O(blocks).
    ///
    /// # Errors
    /// [`Error::Shape`] for a salt of more than 256 bytes.
    pub fn forget(&mut self, salt: Option<&[u8]>) -> Result<()> {
        self.gate()?;
        salt.map_or(Ok(()), check_salt)?;
        self.recorder.make_room(salt.map_or(0, <[u8]>::len), None)?;
        while let Some(root) = self.index.any_root(salt) {
            self.drop_entry(self.index.leaf_below(root), Verb::Forget);
        }
        if salt.is_none() {
            for page in (1..self.pool.num_mapped()).map(|page| Page(page as i32)) {
                if self.pool.entry_of(page) == KEPT {
                    self.drop_kept(page, Verb::Forget);
                }
            }
        }
        self.note(&BlockCall::Forget { salt: salt.map(Into::into) }, &[], None);
        Ok(())
    }

    /// Notes that every step up to `step` is complete: blocks dropped after them can be taken again. O(fenced blocks).
    ///
    /// # Errors
    /// [`Error::Shape`] without fencing; [`Error::Order`] for a step before one that is complete already.
    pub fn complete(&mut self, step: u64) -> Result<()> {
        self.gate()?;
        if !self.config.fencing {
            return Err(Error::Shape(format!("complete of step {step}: the pool was built without fencing")));
        }
        if step < self.completed {
            return Err(Error::Order(format!("complete of step {step}: step {} is complete already", self.completed)));
        }
        self.recorder.make_room(0, None)?;
        self.completed = step;
        self.pool.complete(step);
        self.note(&BlockCall::Complete { step }, &[], None);
        Ok(())
    }
}
