//! The prefix index: which tokens have their KV in which pages (docs/contract.md, Prefix cache).
//!
//! A tree for each salt. An *entry* is a span of up to Q tokens behind its parent, and a page of every group for each P
//! of them; Q is the least common multiple of the page sizes. Only an entry of Q tokens, a *whole* one, has children;
//! a shorter one is a *tail*. The children of an entry are in the order of their tokens, and none begins with another,
//! so a binary search finds the child that agrees with most of given tokens. Tokens are compared, never hashed.

use crate::digest::Digest;
use crate::error::Result;
use crate::ids::{Page, ceil_div};
use crate::memory::{copied, room, with_room};

/// The number of no entry.
pub(crate) const NONE: u32 = 0;

/// One entry, or the root of a salt, which has no tokens.
#[derive(Debug, Clone, Default)]
struct Entry {
    /// [`NONE`] for a root and for an entry that is not in use.
    parent: u32,
    /// Tokens.
    len: u32,
    /// How many of the tokens have draft KV.
    drafted: u32,
    /// The root of its salt; itself for a root.
    root: u32,
    salt: Box<[u8]>,
    children: Vec<u32>,
}

/// The trees, in one store. Entries are named by their place in it.
#[derive(Debug, Clone)]
pub(crate) struct PrefixIndex {
    /// Q; at most the tokens of a row, rounded up to a whole page of each group alone.
    span: usize,
    page_sizes: Vec<usize>,
    /// Per group: where its pages begin among those of an entry; then the number of all.
    first_page: Vec<usize>,
    entries: Vec<Entry>,
    /// `span` for each entry.
    tokens: Vec<i32>,
    /// For each entry a page of every group for each P tokens; 0 if there is none.
    pages: Vec<i32>,
    /// Places in the store that can be used again.
    unused: Vec<u32>,
    /// The roots, in the order of their salts.
    roots: Vec<u32>,
    num_tokens: usize,
}

fn bytes_of<T>(values: &Vec<T>) -> usize {
    values.capacity() * size_of::<T>()
}

/// How many tokens two slices begin with in common.
fn common(a: &[i32], b: &[i32]) -> usize {
    let len = a.len().min(b.len());
    if a[..len] == b[..len] {
        return len;
    }
    a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(len)
}

impl PrefixIndex {
    /// An empty index of groups with these page sizes, for rows of up to `max_len` tokens.
    pub(crate) fn new(page_sizes: impl Iterator<Item = i64>, max_len: i32) -> Self {
        let page_sizes: Vec<usize> = page_sizes.map(|size| size as usize).collect();
        let max_entry_len = max_len as usize;
        let gcd = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        // One span that no row can fill serves as well as a longer one.
        let span = page_sizes.iter().fold(1, |span: usize, &size| (span / gcd(span, size)).saturating_mul(size));
        let span = if span > max_entry_len { max_entry_len } else { span };
        let mut first_page = vec![0];
        for &size in &page_sizes {
            first_page.push(first_page[first_page.len() - 1] + ceil_div(span as i64, size as i64) as usize);
        }
        let (tokens, pages) = (Vec::new(), Vec::new());
        let (unused, roots) = (Vec::new(), Vec::new());
        let entries = vec![Entry::default()];
        Self { span, page_sizes, first_page, entries, tokens, pages, unused, roots, num_tokens: 0 }
    }

    /// Q.
    pub(crate) fn span(&self) -> usize {
        self.span
    }

    /// Entries, roots not among them.
    pub(crate) fn num_entries(&self) -> usize {
        self.entries.len() - 1 - self.unused.len() - self.roots.len()
    }

    /// Tokens of all entries.
    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Bytes that the index takes, O(entries).
    pub(crate) fn num_bytes(&self) -> usize {
        let lists = self.entries.iter().map(|entry| bytes_of(&entry.children)).sum();
        let stores = [bytes_of(&self.entries), bytes_of(&self.tokens), bytes_of(&self.pages)];
        stores.into_iter().chain([lists, bytes_of(&self.unused), bytes_of(&self.roots)]).sum()
    }

    /// Tokens of an entry.
    pub(crate) fn len(&self, entry: u32) -> usize {
        self.entries[entry as usize].len as usize
    }

    /// How many of an entry's tokens have draft KV.
    pub(crate) fn drafted(&self, entry: u32) -> usize {
        self.entries[entry as usize].drafted as usize
    }

    /// The entry before, or the root of its salt; [`NONE`] for a root.
    pub(crate) fn parent(&self, entry: u32) -> u32 {
        self.entries[entry as usize].parent
    }

    /// Tokens before an entry that has a root. O(entries before it).
    pub(crate) fn start(&self, entry: u32) -> usize {
        let before = std::iter::successors(Some(self.parent(entry)), |&entry| Some(self.parent(entry)));
        before.take_while(|&entry| self.parent(entry) != NONE).count() * self.span
    }

    /// The root of the entry's salt. O(1).
    pub(crate) fn root_of(&self, entry: u32) -> u32 {
        self.entries[entry as usize].root
    }

    pub(crate) fn children(&self, entry: u32) -> &[u32] {
        &self.entries[entry as usize].children
    }

    pub(crate) fn tokens(&self, entry: u32) -> &[i32] {
        &self.tokens[entry as usize * self.span..][..self.len(entry)]
    }

    /// How many pages of the group `len` tokens of an entry take.
    pub(crate) fn columns(&self, group: usize, len: usize) -> usize {
        len.div_ceil(self.page_sizes[group])
    }

    fn page_range(&self, entry: u32, group: usize) -> std::ops::Range<usize> {
        let first = entry as usize * self.first_page[self.page_sizes.len()] + self.first_page[group];
        first..first + self.columns(group, self.len(entry))
    }

    /// The entry's pages of the group, one for each P tokens; 0 for one that was given up.
    pub(crate) fn pages(&self, entry: u32, group: usize) -> &[i32] {
        &self.pages[self.page_range(entry, group)]
    }

    pub(crate) fn set_page(&mut self, entry: u32, group: usize, column: usize, page: Page) {
        let index = self.page_range(entry, group).start + column;
        self.pages[index] = page.0;
    }

    /// Whether the entry has no page of any group.
    pub(crate) fn is_bare(&self, entry: u32) -> bool {
        (0..self.page_sizes.len()).all(|group| self.pages(entry, group).iter().all(|&page| page == 0))
    }

    fn place_of_root(&self, salt: &[u8]) -> std::result::Result<usize, usize> {
        self.roots.binary_search_by(|&root| (*self.entries[root as usize].salt).cmp(salt))
    }

    /// The root of the salt; [`NONE`] if nothing is indexed under it.
    pub(crate) fn root(&self, salt: &[u8]) -> u32 {
        self.place_of_root(salt).map_or(NONE, |index| self.roots[index])
    }

    /// The root of the salt, or without one the first root; nothing if there is none.
    pub(crate) fn any_root(&self, salt: Option<&[u8]>) -> Option<u32> {
        salt.map_or(self.roots.first().copied(), |salt| Some(self.root(salt)).filter(|&root| root != NONE))
    }

    /// The child that agrees with most of `tokens`, and with how many; nothing if there is no child. If it does not
    /// begin with `tokens`, nor they with it, a new child belongs at the place that is returned.
    pub(crate) fn nearest_child(&self, parent: u32, tokens: &[i32]) -> (usize, Option<(u32, usize)>) {
        let children = self.children(parent);
        if let &[only] = children {
            let agree = common(self.tokens(only), tokens);
            return (usize::from(self.tokens(only)[agree..] < tokens[agree..]), Some((only, agree)));
        }
        let index = children.partition_point(|&child| self.tokens(child) < tokens);
        let nearest = [index.checked_sub(1), Some(index)].into_iter().flatten().filter_map(|at| {
            let &child = children.get(at)?;
            Some((child, common(self.tokens(child), tokens)))
        });
        (index, nearest.max_by_key(|&(_, agree)| agree))
    }

    /// The child that knows the draft KV of most of `tokens`, and of how many; nothing if none knows any.
    pub(crate) fn nearest_drafted(&self, parent: u32, tokens: &[i32]) -> Option<(u32, usize)> {
        self.nearest_by(parent, tokens, |child, agree| self.drafted(child).min(agree))
    }

    /// The child with the greatest measure, and that measure; nothing if none is above 0. The measure of a child that
    /// agrees with a number of tokens is at most this number.
    pub(crate) fn nearest_by(
        &self,
        parent: u32,
        tokens: &[i32],
        measure: impl Fn(u32, usize) -> usize,
    ) -> Option<(u32, usize)> {
        let children = self.children(parent);
        let index = children.partition_point(|&child| self.tokens(child) < tokens);
        let (before, after) = children.split_at(index);
        let mut best = None;
        // The further away, the fewer tokens agree.
        for side in [&mut before.iter().rev() as &mut dyn Iterator<Item = &u32>, &mut after.iter()] {
            for &child in side {
                let (agree, best_len) = (common(self.tokens(child), tokens), best.map_or(0, |(_, best_len)| best_len));
                if agree <= best_len {
                    break;
                }
                let measured = measure(child, agree);
                if measured > best_len {
                    best = Some((child, measured));
                }
            }
        }
        best
    }

    /// Another child of the entry's parent that begins with most of the entry's tokens, and with how many; nothing if
    /// none begins with any.
    pub(crate) fn nearest_sibling(&self, entry: u32) -> Option<(u32, usize)> {
        let siblings = self.children(self.parent(entry));
        let index = siblings.partition_point(|&child| self.tokens(child) < self.tokens(entry));
        let beside = [index.checked_sub(1), Some(index + 1)].into_iter().flatten().filter_map(|at| siblings.get(at));
        let agreeing = beside.map(|&child| (child, common(self.tokens(child), self.tokens(entry))));
        agreeing.filter(|&(_, agree)| agree > 0).max_by_key(|&(_, agree)| agree)
    }

    /// Takes the memory for `num` more entries, each behind the one before, under `parent` (or under a new root), and
    /// for giving all entries up.
    pub(crate) fn make_room(&mut self, parent: u32, num: usize) -> Result<()> {
        let what = "the prefix index";
        let fresh = (num + 1).saturating_sub(self.unused.len());
        room(&mut self.entries, fresh, what)?;
        let all = self.entries.len() + fresh;
        let (tokens, pages, unused) = (self.tokens.len(), self.pages.len(), self.unused.len());
        room(&mut self.tokens, (all * self.span).saturating_sub(tokens), what)?;
        room(&mut self.pages, (all * self.first_page[self.page_sizes.len()]).saturating_sub(pages), what)?;
        room(&mut self.unused, all.saturating_sub(unused), what)?;
        room(&mut self.roots, 1, what)?;
        if parent != NONE {
            room(&mut self.entries[parent as usize].children, 1, what)?;
        }
        Ok(())
    }

    fn take(&mut self) -> u32 {
        if let Some(entry) = self.unused.pop() {
            return entry;
        }
        self.entries.push(Entry::default());
        self.tokens.resize(self.entries.len() * self.span, 0);
        self.pages.resize(self.entries.len() * self.first_page[self.page_sizes.len()], 0);
        self.entries.len() as u32 - 1
    }

    /// Adds the root of a salt that has none.
    pub(crate) fn add_root(&mut self, salt: Box<[u8]>) -> u32 {
        let index = self.place_of_root(&salt).unwrap_or_else(|index| index);
        let root = self.take();
        self.entries[root as usize] = Entry { root, salt, ..Entry::default() };
        self.roots.insert(index, root);
        root
    }

    /// Adds an entry without pages as the child at `index`, from [`nearest_child`](Self::nearest_child).
    pub(crate) fn add(&mut self, parent: u32, index: usize, tokens: &[i32]) -> u32 {
        let entry = self.take();
        let root = self.root_of(parent);
        self.entries[entry as usize] = Entry { parent, root, ..Entry::default() };
        self.entries[parent as usize].children.insert(index, entry);
        self.grow(entry, tokens);
        entry
    }

    /// Makes a tail longer: `tokens` begin with its own. Pages of new columns are 0.
    pub(crate) fn grow(&mut self, entry: u32, tokens: &[i32]) {
        let at = entry as usize;
        self.num_tokens += tokens.len() - self.len(entry);
        self.tokens[at * self.span..][..tokens.len()].copy_from_slice(tokens);
        self.entries[at].len = tokens.len() as u32;
    }

    /// Makes an entry without children a shorter tail. The pages behind it must be gone.
    pub(crate) fn shorten(&mut self, entry: u32, len: usize) {
        self.num_tokens -= self.len(entry) - len;
        let entry = &mut self.entries[entry as usize];
        (entry.len, entry.drafted) = (len as u32, entry.drafted.min(len as u32));
    }

    pub(crate) fn set_drafted(&mut self, entry: u32, drafted: usize) {
        self.entries[entry as usize].drafted = drafted as u32;
    }

    /// Removes an entry without children, or a root without children. Its pages are the caller's to give up before.
    pub(crate) fn remove(&mut self, entry: u32) {
        let parent = self.parent(entry);
        if parent == NONE {
            if let Ok(place) = self.place_of_root(&self.entries[entry as usize].salt) {
                self.roots.remove(place);
            }
        } else {
            let siblings = self.children(parent);
            let index = match siblings {
                [_] => 0,
                _ => siblings.partition_point(|&child| self.tokens(child) < self.tokens(entry)),
            };
            self.entries[parent as usize].children.remove(index);
        }
        for group in 0..self.page_sizes.len() {
            let range = self.page_range(entry, group);
            self.pages[range].fill(0);
        }
        self.num_tokens -= self.len(entry);
        self.entries[entry as usize] = Entry::default();
        self.unused.push(entry);
    }

    /// An entry below this one, or itself, that has no children.
    pub(crate) fn leaf_below(&self, mut entry: u32) -> u32 {
        while let Some(&child) = self.children(entry).last() {
            entry = child;
        }
        entry
    }

    /// An entry and all that continue it, in the order in which [`leaf_below`](Self::leaf_below) names them if each is
    /// removed then.
    pub(crate) fn leaves_first(&self, entry: u32) -> Result<Vec<u32>> {
        let what = "the entries behind one";
        let (mut descendants, mut open) = (Vec::new(), with_room(1, what)?);
        open.push(entry);
        // Parents first, the first child before the others: the other way round.
        while let Some(entry) = open.pop() {
            room(&mut descendants, 1, what)?;
            descendants.push(entry);
            room(&mut open, self.children(entry).len(), what)?;
            open.extend(self.children(entry).iter().rev());
        }
        descendants.reverse();
        Ok(descendants)
    }

    /// The salts in use, in order, each with its root.
    pub(crate) fn salts(&self) -> impl Iterator<Item = (&[u8], u32)> {
        self.roots.iter().map(|&root| (&*self.entries[root as usize].salt, root))
    }

    /// The entry behind `entry` in an order in which parents come before their children; of a root, those of its salt.
    fn next(&self, entry: u32) -> Option<u32> {
        if let Some(&child) = self.children(entry).first() {
            return Some(child);
        }
        let mut at = entry;
        while self.parent(at) != NONE {
            let siblings = self.children(self.parent(at));
            let index = siblings.partition_point(|&child| self.tokens(child) <= self.tokens(at));
            if let Some(&next) = siblings.get(index) {
                return Some(next);
            }
            at = self.parent(at);
        }
        None
    }

    /// The entries below a root, parents before their children.
    pub(crate) fn below(&self, root: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.next(root), |&entry| self.next(entry))
    }

    /// Every entry, salt by salt, parents before their children.
    pub(crate) fn all(&self) -> impl Iterator<Item = u32> + '_ {
        self.roots.iter().flat_map(|&root| self.below(root))
    }

    /// Adds everything that decides what the index will do.
    pub(crate) fn hash(&self, digest: &mut Digest) {
        for (salt, root) in self.salts() {
            digest.bytes(salt);
            for entry in self.below(root) {
                digest.ints(self.tokens(entry));
                digest.word(self.drafted(entry) as u64);
                digest.word(self.children(entry).len() as u64);
                (0..self.page_sizes.len()).for_each(|group| digest.ints(self.pages(entry, group)));
            }
        }
    }

    /// A copy with the memory to give all entries up.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let what = "the prefix index";
        let mut entries = with_room(self.entries.len(), what)?;
        for entry in &self.entries {
            let mut salt = with_room(entry.salt.len(), what)?;
            salt.extend_from_slice(&entry.salt);
            let mut children = with_room(entry.children.capacity(), what)?;
            children.extend_from_slice(&entry.children);
            entries.push(Entry { salt: salt.into_boxed_slice(), children, ..*entry });
        }
        let mut unused = with_room(self.entries.len(), what)?;
        unused.extend_from_slice(&self.unused);
        Ok(Self {
            page_sizes: self.page_sizes.clone(),
            first_page: self.first_page.clone(),
            entries,
            tokens: copied(&self.tokens, what)?,
            pages: copied(&self.pages, what)?,
            unused,
            roots: copied(&self.roots, what)?,
            ..*self
        })
    }

    /// Every broken rule of the trees themselves.
    pub(crate) fn broken(&self) -> Vec<String> {
        let mut report = Vec::new();
        let mut note = |entry: u32, text: &str| report.push(format!("entry {entry} of the prefix index {text}"));
        let (mut num_entries, mut num_tokens) = (0, 0);
        for entry in self.all() {
            (num_entries, num_tokens) = (num_entries + 1, num_tokens + self.len(entry));
            if self.len(entry) == 0 || self.len(entry) > self.span || self.drafted(entry) > self.len(entry) {
                note(entry, "has a length out of its range");
            }
            if self.len(entry) < self.span && !self.children(entry).is_empty() {
                note(entry, "is a tail with children");
            }
        }
        for parent in self.roots.iter().copied().chain(self.all()) {
            let children = self.children(parent);
            let is_apart = |pair: &[u32]| {
                let (a, b) = (self.tokens(pair[0]), self.tokens(pair[1]));
                a < b && !b.starts_with(a)
            };
            if !children.windows(2).all(is_apart) {
                note(parent, "has children out of order");
            }
            if children.iter().any(|&child| self.parent(child) != parent) {
                note(parent, "has children of another entry");
            }
            if children.iter().any(|&child| self.root_of(child) != self.root_of(parent)) {
                note(parent, "has children of another root");
            }
        }
        if (num_entries, num_tokens) != (self.num_entries(), self.num_tokens) {
            report.push(format!(
                "the prefix index has {num_entries} entries of {num_tokens} tokens, it counts {} of {}",
                self.num_entries(),
                self.num_tokens
            ));
        }
        report
    }
}
