//! The header that is checked in is the one that the sources give.

use std::path::Path;

/// `make lint` runs this; with `SPECPOOL_WRITE=1`, as in `make capi`, the header is written.
#[test]
fn the_header_is_up_to_date() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let names = ["status", "pool", "state", "ledger", "lend", "transfer", "step", "event"];
    let files = names.map(|name| here.join(format!("src/{name}.rs")));
    let builder = files.iter().fold(cbindgen::Builder::new().with_config(config), cbindgen::Builder::with_src);
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    // C has no sections in its comments.
    let header = String::from_utf8(header).unwrap().replace("//\n// # Safety\n", "").into_bytes();
    let path = here.join("include/specpool.h");
    if std::env::var_os("SPECPOOL_WRITE").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    assert!(std::fs::read(&path).unwrap_or_default() == header, "include/specpool.h is old: run `make capi`");
}
