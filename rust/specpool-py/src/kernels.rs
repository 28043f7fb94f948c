//! The text of the CUDA kernels, which the wheel carries inside this library.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

macro_rules! texts {
    ($($name:literal),*) => { [$(($name, include_str!(concat!("../../../cuda/", $name)))),*] };
}

const FILES: [(&str, &str); 11] = texts![
    "common.cuh",
    "logits.cuh",
    "tensor.cuh",
    "attend.cu",
    "layers.cu",
    "moves.cu",
    "reads.cu",
    "sample.cu",
    "states.cu",
    "tables.cu",
    "tree.cu"
];

/// Names of the kernel files, in the order in which a compiler takes them.
pub fn names() -> [&'static str; FILES.len()] {
    FILES.map(|(name, _)| name)
}

#[doc = doc!("kernel_source")]
#[pyfunction]
pub fn kernel_source(name: &str) -> PyResult<&'static str> {
    match FILES.iter().find(|(file, _)| *file == name) {
        Some((_, text)) => Ok(text),
        None => Err(PyKeyError::new_err(format!("no kernel file {name:?}; there are {:?}", names()))),
    }
}
