//! Numbers and arrays on their way in and out: every wrong one is a specpool error with the numbers.

use numpy::ndarray::{ArrayView1, ArrayView2};
use numpy::npyffi::_PyArray_GET_ITEM_DATA;
use numpy::npyffi::flags::{NPY_ARRAY_ALIGNED, NPY_ARRAY_WRITEABLE};
use numpy::{Element, PyArray1, PyArray2, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specpool_core::{Error, Page, Row};

use crate::errors::{config_error, shape_error, to_py};

/// A whole number of a configuration; one beyond 64 bits is a `ConfigError`, not an `OverflowError`.
#[derive(Clone, Copy)]
pub struct ConfigInt(pub i64);

impl<'a, 'py> FromPyObject<'a, 'py> for ConfigInt {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match value.extract() {
            Ok(number) => Ok(Self(number)),
            Err(_) => Err(config_error(format!("a whole number of 64 bits is needed, got {}", value.repr()?))),
        }
    }
}

/// The entries of any array of the right type, strided or not.
fn elements<T: Element + Copy>(name: &str, array: &Bound<'_, PyArray1<T>>) -> PyResult<Vec<T>> {
    // SAFETY: the array is alive, and only its flags are read.
    let flags = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags };
    if flags & NPY_ARRAY_ALIGNED == 0 {
        return Err(shape_error(format!("{name} is not aligned in memory")));
    }
    Ok(array.try_readonly()?.as_array().to_vec())
}

/// `int32 [n]` from a `NumPy` array of int32 or int64, or a sequence of ints; anything else is a `ShapeError`.
pub fn int_array(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    if let Ok(array) = value.cast::<PyArray1<i32>>() {
        return elements(name, array);
    }
    let narrow = |number: i64| {
        i32::try_from(number).map_err(|_| shape_error(format!("{name} holds {number}, which is no int32")))
    };
    if let Ok(array) = value.cast::<PyArray1<i64>>() {
        return elements(name, array)?.into_iter().map(narrow).collect();
    }
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        return Err(shape_error(format!(
            "{name} must be a 1-dimensional array of int32 or int64, got {} dimensions of {}",
            array.ndim(),
            array.dtype().typeobj().name()?
        )));
    }
    match value.extract::<Vec<i64>>() {
        Ok(numbers) => numbers.into_iter().map(narrow).collect(),
        Err(_) => Err(shape_error(format!("{name} must be an array or a list of ints, got {}", value.repr()?))),
    }
}

/// One id or length that must be an `int32`.
pub fn int32(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i32> {
    value.extract().map_err(|_| match value.repr() {
        Ok(shown) => shape_error(format!("{name} must be an int32, got {shown}")),
        Err(error) => error,
    })
}

/// A row id.
pub fn row(value: &Bound<'_, PyAny>) -> PyResult<Row> {
    int32("row", value).map(Row)
}

/// A page id.
pub fn page(value: &Bound<'_, PyAny>) -> PyResult<Page> {
    int32("page", value).map(Page)
}

/// A group's index.
pub fn group(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let index = int32("group", value)?;
    usize::try_from(index).map_err(|_| shape_error(format!("group must be at least 0, got {index}")))
}

/// A step's number.
pub fn step(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|_| match value.repr() {
        Ok(shown) => to_py(Error::Order(format!("no step has the number {shown}"))),
        Err(error) => error,
    })
}

/// A read-only `NumPy` view of `data`, which lives in `owner` and is never moved while `owner` lives.
pub fn view<'py, T: Element>(data: &[T], owner: &Bound<'py, PyAny>) -> Bound<'py, PyArray1<T>> {
    // SAFETY: the array keeps `owner` alive, whose vectors keep their length and place; Python only reads.
    unsafe {
        let array = PyArray1::borrow_from_array(&ArrayView1::from(data), owner.clone());
        (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags &= !NPY_ARRAY_WRITEABLE;
        array
    }
}

/// As [`view`], with `columns` entries a line.
pub fn view_2d<'py, T: Element>(
    data: &[T],
    columns: usize,
    owner: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray2<T>>> {
    let lines = data.len().checked_div(columns).unwrap_or(0);
    let shaped = ArrayView2::from_shape((lines, columns), data).map_err(|error| shape_error(error.to_string()))?;
    // SAFETY: as in `view`.
    unsafe {
        let array = PyArray2::borrow_from_array(&shaped, owner.clone());
        (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags &= !NPY_ARRAY_WRITEABLE;
        Ok(array)
    }
}
