//! Makes the docstrings of `_core.pyi` available to the binding, so that `help()` and the stub have one source.
//!
//! Writes `docs.rs` with one macro. `doc!("Ledger.admit")` is the docstring of that method as a string literal. A name
//! without a docstring in the stub is a compile error.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let stub =
        Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../python/specpool/_core.pyi");
    println!("cargo:rerun-if-changed={}", stub.display());
    let text = fs::read_to_string(&stub).unwrap_or_else(|error| panic!("{}: {error}", stub.display()));
    let mut arms = String::new();
    for (name, doc) in docstrings(&text) {
        writeln!(arms, "    ({name:?}) => {{ {doc:?} }};").expect("a string takes all");
    }
    let missing = r#"compile_error!(concat!("python/specpool/_core.pyi has no docstring for ", $name))"#;
    let code = format!(
        "/// The docstring of a name in `_core.pyi`; of the module itself: `_core`.\n\
         macro_rules! doc {{\n{arms}    ($name:literal) => {{ {missing} }};\n}}\n"
    );
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it")).join("docs.rs");
    fs::write(&out, code).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
}

/// Finds (dotted name, docstring) of the module, its classes, their methods and the functions.
///
/// It relies on ruff's format of the stub: a `class` or `def` begins a line; a head of several lines ends with a line
/// of its own that closes the parenthesis; a docstring is in `"""` and follows the head at once.
fn docstrings(stub: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut class = String::new();
    let mut name = Some("_core".to_owned()); // The name whose docstring may come on this line.
    let mut lines = stub.lines();
    while let Some(line) = lines.next() {
        let (code, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        if let (Some(name), Some(opened)) = (&name, code.strip_prefix("\"\"\"")) {
            found.push((name.clone(), docstring(opened, &mut lines)));
        }
        name = None;
        let is_head = code.starts_with("class ") || code.starts_with("def ");
        if !is_head {
            continue;
        }
        let word = code.split_once(' ').map_or("", |(_, rest)| rest);
        let word = word.split(['(', ':']).next().unwrap_or_default();
        let mut last = line;
        while !last.ends_with(':') && !last.ends_with("...") {
            last = lines.next().unwrap_or_else(|| panic!("_core.pyi: the head of {word} has no end"));
        }
        if indent == 0 {
            class = if code.starts_with("class ") { format!("{word}.") } else { String::new() };
        }
        let is_open = last.ends_with(':');
        name = is_open.then(|| if indent == 0 { word.to_owned() } else { format!("{class}{word}") });
    }
    found
}

/// The docstring that begins with `opened`, without its indentation, as `inspect.cleandoc` has it.
fn docstring<'a>(opened: &'a str, lines: &mut impl Iterator<Item = &'a str>) -> String {
    if let Some(only) = opened.strip_suffix("\"\"\"") {
        return only.to_owned();
    }
    let rest: Vec<&str> = lines.take_while(|line| line.trim_start() != "\"\"\"").collect();
    let indents = rest.iter().filter(|line| !line.is_empty()).map(|line| line.len() - line.trim_start().len());
    let indent = indents.min().unwrap_or(0);
    let rest = rest.iter().map(|line| line.get(indent..).unwrap_or_default());
    std::iter::once(opened).chain(rest).collect::<Vec<_>>().join("\n")
}
