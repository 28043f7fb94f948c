//! `specpool._core`: the Python binding of `specpool-core`. It converts, checks array arguments and
//! nothing else; names are those of the core.
#![allow(missing_docs, unreachable_pub, reason = "documented in _core.pyi, which stubtest checks")]

mod errors;
mod shape;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::shape::Shape;

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
