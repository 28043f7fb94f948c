//! [`SuffixIndex`]: what followed the end of a text before, with counts, in bounded memory.
//!
//! It is a suffix automaton that grows token by token. A state stands for all strings that end at the same places;
//! its `link` is the state of the longest shorter ones. Counts are exact for strings of at most `max_context` tokens,
//! and cost at most that many steps per token.
//!
//! An automaton forgets nothing, so there are two generations: when the young one is full it becomes the old one, and
//! the old one is dropped. Each has at most `max_tokens / 2` tokens and twice as many states.

use std::collections::{BinaryHeap, HashMap};

use crate::check::in_range;
use crate::error::{Error, Result};

const NONE: u32 = u32::MAX;
/// The states that a search for a node's children looks at, at most.
const MAX_LOOKS: usize = 1 << 12;

/// Proposed nodes; node 0 is the root, and parents precede children.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// Token of each node but the root.
    pub tokens: Vec<u32>,
    /// Node that each of them continues.
    pub parents: Vec<u32>,
    /// Probability of each path by the counts, in `(0, 1]`.
    pub probabilities: Vec<f32>,
    /// Tokens of the text's end that occurred before; 0 = none.
    pub match_len: usize,
}

#[derive(Debug, Clone, Copy)]
struct State {
    len: u32, // of the longest string
    link: u32,
    first_edge: u32,
    count: u32,  // occurrences of its strings of at most `max_context` tokens
    latest: u32, // number of the token that ends the latest of them
}

#[derive(Debug, Clone, Copy)]
struct Edge {
    token: u32,
    to: u32,
    next: u32,
}

/// The state that holds the last `len` tokens of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    state: u32,
    len: u32,
}

const START: Place = Place { state: 0, len: 0 };

#[derive(Debug)]
struct Automaton {
    states: Vec<State>,
    edges: Vec<Edge>,
    by_token: HashMap<(u32, u32), u32>, // (state, token) -> edge
    num_tokens: u32,
}

impl Automaton {
    fn new() -> Self {
        let root = State { len: 0, link: NONE, first_edge: NONE, count: 0, latest: 0 };
        Self { states: vec![root], edges: Vec::new(), by_token: HashMap::new(), num_tokens: 0 }
    }

    fn state(&self, at: u32) -> &State {
        &self.states[at as usize]
    }

    fn edge(&self, state: u32, token: u32) -> Option<u32> {
        self.by_token.get(&(state, token)).copied()
    }

    fn next(&self, state: u32, token: u32) -> Option<u32> {
        self.edge(state, token).map(|edge| self.edges[edge as usize].to)
    }

    fn put(&mut self, state: u32, token: u32, to: u32) {
        let next = self.state(state).first_edge;
        let edge = index(self.edges.len());
        self.edges.push(Edge { token, to, next });
        self.states[state as usize].first_edge = edge;
        self.by_token.insert((state, token), edge);
    }

    fn edges_of(&self, state: u32) -> impl Iterator<Item = Edge> + '_ {
        let mut at = self.state(state).first_edge;
        std::iter::from_fn(move || {
            let edge = *self.edges.get(at as usize)?;
            at = edge.next;
            Some(edge)
        })
    }

    /// Splits `q`: its strings of at most `len` tokens get a state of their own, to which the edges lead that come
    /// from `p` and above.
    fn split(&mut self, p: u32, token: u32, q: u32, len: u32) -> u32 {
        let clone = index(self.states.len());
        self.states.push(State { len, first_edge: NONE, ..*self.state(q) });
        let edges: Vec<Edge> = self.edges_of(q).collect();
        for edge in edges.into_iter().rev() {
            self.put(clone, edge.token, edge.to);
        }
        self.states[q as usize].link = clone;
        let mut p = p;
        while let Some(edge) = (p != NONE).then(|| self.edge(p, token)).flatten() {
            if self.edges[edge as usize].to != q {
                break;
            }
            self.edges[edge as usize].to = clone;
            p = self.state(p).link;
        }
        clone
    }

    /// Continues the text whose state is `last` by a token, and returns its new state.
    fn extend(&mut self, last: u32, token: u32) -> u32 {
        let len = self.state(last).len + 1;
        if let Some(q) = self.next(last, token) {
            // Another text went the same way.
            return if self.state(q).len == len { q } else { self.split(last, token, q, len) };
        }
        let new = index(self.states.len());
        self.states.push(State { len, link: 0, first_edge: NONE, count: 0, latest: 0 });
        let mut p = last;
        while p != NONE && self.edge(p, token).is_none() {
            self.put(p, token, new);
            p = self.state(p).link;
        }
        if p != NONE {
            let q = self.next(p, token).unwrap_or(0);
            let len = self.state(p).len + 1;
            let link = if self.state(q).len == len { q } else { self.split(p, token, q, len) };
            self.states[new as usize].link = link;
        }
        new
    }

    /// The state of the last `place.len` tokens: a split may have moved them to a link.
    fn settled(&self, mut place: Place) -> Place {
        while place.len > 0 && self.state(self.state(place.state).link).len >= place.len {
            place.state = self.state(place.state).link;
        }
        if place.len == 0 { START } else { place }
    }

    /// `place` without its first tokens, so that `len` are left.
    fn cut(&self, place: Place, len: u32) -> Place {
        self.settled(Place { len: place.len.min(len), ..place })
    }

    /// The place one token on, or the longest end of it that the automaton knows.
    fn step(&self, place: Place, token: u32) -> Place {
        let mut place = self.settled(place);
        loop {
            if let Some(to) = self.next(place.state, token) {
                return self.settled(Place { state: to, len: place.len + 1 });
            }
            if place.state == 0 {
                return START;
            }
            let link = self.state(place.state).link;
            place = Place { state: link, len: self.state(link).len };
        }
    }

    /// The longest end of `place`, of at most `max_len` tokens, that something followed.
    fn followed(&self, place: Place, max_len: u32) -> Place {
        let mut place = self.cut(place, max_len);
        while place.len > 0 && self.state(place.state).first_edge == NONE {
            let link = self.state(place.state).link;
            place = Place { state: link, len: self.state(link).len };
        }
        place
    }

    /// Counts an occurrence of each end of a text.
    fn count(&mut self, place: Place) {
        let now = self.num_tokens;
        let mut at = self.settled(place).state;
        while at != 0 {
            let state = &mut self.states[at as usize];
            state.count = state.count.saturating_add(1);
            state.latest = now;
            at = state.link;
        }
    }

    /// The likeliest continuations of `place`, best first: token, probability, place.
    fn children(&self, place: Place, limit: usize) -> Vec<(u32, f32, Place)> {
        let mut edges: Vec<_> = self.edges_of(place.state).take(MAX_LOOKS).collect();
        let total: f32 = edges.iter().map(|edge| f32_of(self.state(edge.to).count)).sum();
        edges.sort_unstable_by_key(|edge| {
            let to = self.state(edge.to);
            std::cmp::Reverse((to.count, to.latest, std::cmp::Reverse(edge.token)))
        });
        let child = |edge: Edge| {
            let p = f32_of(self.state(edge.to).count) / total.max(1.0);
            (edge.token, p, self.settled(Place { state: edge.to, len: place.len + 1 }))
        };
        edges.into_iter().take(limit).map(child).collect()
    }
}

#[derive(Debug, Clone, Copy)]
struct Text {
    last: u32,    // its state in the young automaton
    young: Place, // its end there, of at most `max_context` tokens
    old: Place,   // its end in the old automaton
}

/// The texts of some requests, and what may follow the end of each.
#[derive(Debug)]
pub struct SuffixIndex {
    max_tokens: u32,
    max_context: u32,
    young: Automaton,
    old: Automaton,
    texts: HashMap<u64, Text>,
    num_texts: u64,
}

impl SuffixIndex {
    /// An empty index.
    ///
    /// # Errors
    /// [`Error::Config`] unless `2 <= max_tokens <= 2^28` and `1 <= max_context <= 256`.
    pub fn new(max_tokens: i64, max_context: i64) -> Result<Self> {
        let max_tokens = in_range("max_tokens", max_tokens, 2, 1 << 28)?;
        let max_context = in_range("max_context", max_context, 1, 256)?;
        Ok(Self {
            max_tokens: u32::try_from(max_tokens).unwrap_or(2),
            max_context: u32::try_from(max_context).unwrap_or(1),
            young: Automaton::new(),
            old: Automaton::new(),
            texts: HashMap::new(),
            num_texts: 0,
        })
    }

    /// Begins an empty text and returns its number.
    pub fn begin(&mut self) -> u64 {
        self.num_texts += 1;
        self.texts.insert(self.num_texts, Text { last: 0, young: START, old: START });
        self.num_texts
    }

    /// Drops a text's place. What it said stays known until its generation is dropped.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such text.
    pub fn end(&mut self, text: u64) -> Result<()> {
        self.texts.remove(&text).map(|_| ()).ok_or_else(|| unknown(text))
    }

    /// Adds tokens to the end of a text.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such text.
    pub fn extend(&mut self, text: u64, tokens: &[u32]) -> Result<()> {
        for &token in tokens {
            if self.young.num_tokens >= self.max_tokens / 2 {
                self.renew();
            }
            let at = *self.texts.get(&text).ok_or_else(|| unknown(text))?;
            let (young, max_len) = (&mut self.young, self.max_context);
            young.num_tokens += 1;
            let last = young.extend(at.last, token);
            let longer = young.step(at.young, token);
            let place = young.cut(longer, max_len);
            young.count(place);
            let old = self.old.cut(self.old.step(at.old, token), max_len);
            self.texts.insert(text, Text { last, young: place, old });
        }
        if self.texts.contains_key(&text) { Ok(()) } else { Err(unknown(text)) }
    }

    /// Makes the young generation the old one.
    fn renew(&mut self) {
        self.old = std::mem::replace(&mut self.young, Automaton::new());
        for text in self.texts.values_mut() {
            *text = Text { last: 0, young: START, old: text.young };
        }
    }

    /// The longest end of a text that was followed by something before: whether it is young, and where.
    fn known(&self, text: u64) -> Result<(&Automaton, Place)> {
        let at = self.texts.get(&text).ok_or_else(|| unknown(text))?;
        let max_len = self.max_context - 1; // the next token still counts
        let (young, old) = (self.young.followed(at.young, max_len), self.old.followed(at.old, max_len));
        Ok(if old.len > young.len { (&self.old, old) } else { (&self.young, young) })
    }

    /// How many tokens of a text's end occurred before with something after them, and how likely the likeliest of
    /// these continuations is by the counts; 0 and 0 = none did.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such text.
    pub fn best(&self, text: u64) -> Result<(usize, f32)> {
        let (automaton, place) = self.known(text)?;
        if place.len == 0 {
            return Ok((0, 0.0));
        }
        let first = automaton.children(place, 1).first().map_or(0.0, |&(_, p, _)| p);
        Ok((place.len as usize, first))
    }

    /// Proposes the `num_nodes - 1` likeliest nodes below the root, by the counts, in the order of their
    /// probability; fewer if fewer are known.
    ///
    /// A node's depth is at most `num_steps`, and it has at most `topk` children. Where the text ends, its longest
    /// end that goes on continues.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such text.
    pub fn propose(&self, text: u64, num_steps: usize, topk: usize, num_nodes: usize) -> Result<Proposal> {
        let (automaton, start) = self.known(text)?;
        let match_len = start.len as usize;
        let mut proposal = Proposal { tokens: vec![], parents: vec![], probabilities: vec![], match_len };
        if match_len == 0 {
            return Ok(proposal);
        }
        let mut heap = BinaryHeap::new();
        let mut order = 0;
        let mut open = |heap: &mut BinaryHeap<Open>, node: usize, depth: usize, p: f32, place: Place| {
            if depth == num_steps {
                return;
            }
            let place = automaton.followed(place, self.max_context - 1);
            if place.len == 0 {
                return;
            }
            for (token, share, to) in automaton.children(place, topk) {
                order += 1;
                heap.push(Open {
                    p: p * share,
                    order: std::cmp::Reverse(order),
                    token,
                    parent: node,
                    depth,
                    place: to,
                });
            }
        };
        open(&mut heap, 0, 0, 1.0, start);
        while let Some(best) = heap.pop() {
            if proposal.tokens.len() + 1 >= num_nodes {
                break;
            }
            proposal.tokens.push(best.token);
            proposal.parents.push(index(best.parent));
            proposal.probabilities.push(best.p);
            open(&mut heap, proposal.tokens.len(), best.depth + 1, best.p, best.place);
        }
        Ok(proposal)
    }

    /// Tokens that both generations hold.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        (self.young.num_tokens + self.old.num_tokens) as usize
    }

    /// States of both generations; at most `2 * num_tokens() + 2`.
    #[must_use]
    pub fn num_states(&self) -> usize {
        self.young.states.len() + self.old.states.len()
    }
}

/// A node that may be taken next.
struct Open {
    p: f32,
    order: std::cmp::Reverse<u64>, // the first found of equally likely ones comes first
    token: u32,
    parent: usize,
    depth: usize,
    place: Place,
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.p.total_cmp(&other.p).then(self.order.cmp(&other.order))
    }
}

fn unknown(text: u64) -> Error {
    Error::Config(format!("there is no text {text}"))
}

fn index(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(NONE)
}

#[allow(clippy::cast_precision_loss, reason = "a share of counts")]
fn f32_of(count: u32) -> f32 {
    count as f32
}
