//! Array arguments and results. An array is taken only as it is: exact dtype, number of dimensions, C order, so that
//! nothing is copied or converted behind the caller's back.

use numpy::{
    BorrowError, Element, PyArray, PyArray1, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn,
    PyReadwriteArrayDyn, PyUntypedArray, PyUntypedArrayMethods, dtype, ndarray::Dim, ndarray::Dimension,
    ndarray::IntoDimension,
};
use pyo3::prelude::*;

use crate::errors::shape_error;

/// Largest number of steps, branches or nodes (as `Shape`'s).
const MAX_COUNT: i64 = 1 << 20;

/// An array that is only read.
pub struct Input<'py, T: Element, const D: usize> {
    array: PyReadonlyArrayDyn<'py, T>,
    pub dims: [usize; D],
}

/// An array that is written in place.
pub struct Output<'py, T: Element, const D: usize> {
    array: PyReadwriteArrayDyn<'py, T>,
    pub dims: [usize; D],
}

/// The array itself and its shape, or a `ShapeError` that says what was expected and what came.
fn take<'a, 'py, T: Element, const D: usize>(
    name: &str,
    object: &'a Bound<'py, PyAny>,
) -> PyResult<(&'a Bound<'py, PyArrayDyn<T>>, [usize; D])> {
    if let Ok(array) = object.cast::<PyArrayDyn<T>>() {
        if let Ok(dims) = <[usize; D]>::try_from(array.shape()) {
            if array.is_c_contiguous() {
                return Ok((array, dims));
            }
        }
    }
    let got = match object.cast::<PyUntypedArray>() {
        Ok(array) => {
            let order = if array.is_c_contiguous() { "" } else { ", not contiguous" };
            format!("{} of shape {:?}{order}", array.dtype(), array.shape())
        }
        Err(_) => object.get_type().to_string(),
    };
    let kind = dtype::<T>(object.py());
    let expected = if kind.is_equiv_to(&dtype::<bool>(object.py())) { "bool".to_string() } else { kind.to_string() };
    Err(shape_error(format!("{name} must be a C-contiguous {D}-dimensional NumPy array of {expected}, got {got}")))
}

fn borrowed(name: &str, error: &BorrowError) -> PyErr {
    match error {
        BorrowError::NotWriteable => shape_error(format!("{name} is written in place and must be writable")),
        _ => shape_error(format!("{name} shares memory with another argument of the call")),
    }
}

fn misaligned(name: &str) -> PyErr {
    shape_error(format!("{name} is misaligned for its dtype"))
}

impl<'py, T: Element, const D: usize> Input<'py, T, D> {
    pub fn new(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let (array, dims) = take::<T, D>(name, object)?;
        let array = array.try_readonly().map_err(|error| borrowed(name, &error))?;
        array.as_slice().map_err(|_| misaligned(name))?;
        Ok(Self { array, dims })
    }

    pub fn optional(name: &'static str, object: Option<&Bound<'py, PyAny>>) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object)).transpose()
    }

    pub fn slice(&self) -> &[T] {
        self.array.as_slice().unwrap_or_default()
    }
}

impl<'py, T: Element, const D: usize> Output<'py, T, D> {
    pub fn new(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let (array, dims) = take::<T, D>(name, object)?;
        let array = array.try_readwrite().map_err(|error| borrowed(name, &error))?;
        array.as_slice().map_err(|_| misaligned(name))?;
        Ok(Self { array, dims })
    }

    pub fn slice(&mut self) -> &mut [T] {
        self.array.as_slice_mut().unwrap_or_default()
    }
}

/// Refuses an array of another shape than expected.
pub fn expect_dims<const D: usize>(name: &str, dims: [usize; D], expected: [usize; D]) -> PyResult<()> {
    if dims == expected {
        return Ok(());
    }
    Err(shape_error(format!("{name} must have shape {expected:?}, got {dims:?}")))
}

/// A count or index in `[least, 2^20]`.
pub fn count(name: &str, value: i64, least: i64) -> PyResult<usize> {
    if (least..=MAX_COUNT).contains(&value) {
        return Ok(value as usize);
    }
    Err(shape_error(format!("{name} must be in [{least}, {MAX_COUNT}], got {value}")))
}

/// A new one-dimensional array that takes over `values`.
pub fn vector<T: Element>(py: Python<'_>, values: Vec<T>) -> Bound<'_, PyArray1<T>> {
    PyArray1::from_vec(py, values)
}

/// A new array of shape `dims` that takes over `values`.
pub fn array<T: Element, const D: usize>(
    py: Python<'_>,
    values: Vec<T>,
    dims: [usize; D],
) -> PyResult<Bound<'_, PyArray<T, Dim<[usize; D]>>>>
where
    [usize; D]: IntoDimension<Dim = Dim<[usize; D]>>,
    Dim<[usize; D]>: Dimension,
{
    PyArray1::from_vec(py, values).reshape(dims)
}
