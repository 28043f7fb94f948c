//! Converts numbers and arrays on their way in and out. Every wrong one is a specpool error with the numbers.
//!
//! There are two rules. The ledger's batch calls take [`int_array`]s (int32, int64 or a list) and copy them. Kernels
//! take an [`Input`] or [`Output`] only with the exact dtype, number of dimensions and C order, so that nothing is
//! copied or converted unnoticed.

use std::borrow::Cow;

use numpy::ndarray::{ArrayView1, ArrayView2, Dim, Dimension, IntoDimension};
use numpy::npyffi::flags::{NPY_ARRAY_ALIGNED, NPY_ARRAY_WRITEABLE};
use numpy::npyffi::{self, _PyArray_GET_ITEM_DATA, npy_intp};
use numpy::{
    BorrowError, Element, PyArray, PyArray1, PyArray2, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods,
    PyReadonlyArrayDyn, PyReadwriteArrayDyn, PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PySequence, PyString, PyTuple};
use specpool_core::{Error, Page, Row, check_salt, memory};

use crate::errors::{config_error, shape_error, to_py};

/// Largest number of steps, branches or nodes (as `Shape`'s).
const MAX_COUNT: i64 = 1 << 20;

/// The most entries of a batch's array: no ledger has more rows. A view may repeat one number any number of times.
const MAX_LANES: usize = 1 << 24;

/// The most elements of an array that is returned.
const MAX_ELEMENTS: usize = 1 << 40;

/// A list of anything, with no more entries than a batch can have, whatever length it claims.
pub struct List<T>(pub Vec<T>);

impl<'a, 'py, T: FromPyObjectOwned<'py>> FromPyObject<'a, 'py> for List<T> {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err("a list is needed, got a str or bytes"));
        }
        let sequence = value.cast::<PySequence>()?;
        let len = sequence.len().unwrap_or(0);
        expect_lanes("a list", len)?;
        // A plain list needs no iterator, which would take twice as long.
        if let Ok(list) = value.cast_exact::<PyList>() {
            let mut items = memory::with_room(len, "a list").map_err(to_py)?;
            for item in list.iter().take(len) {
                items.push(item.extract::<T>().map_err(Into::into)?);
            }
            return Ok(Self(items));
        }
        let mut items = Vec::new();
        for item in sequence.try_iter()? {
            expect_lanes("a list", items.len() + 1)?;
            let item = item?.extract::<T>().map_err(Into::into)?;
            memory::room(&mut items, 1, "a list").map_err(to_py)?;
            items.push(item);
        }
        Ok(Self(items))
    }
}

/// A whole number in a configuration, or the text of what was given in its place: only the function that takes it knows
/// its name. Anything else is a `ConfigError`.
pub struct ConfigInt(Result<i64, String>);

/// A whole number among a kernel's arguments, as [`ConfigInt`]; anything else is a `ShapeError`.
pub struct ShapeInt(Result<i64, String>);

impl ConfigInt {
    pub fn of(number: i64) -> Self {
        Self(Ok(number))
    }

    /// The number, or an error with the argument's name.
    pub fn get(self, name: &str) -> PyResult<i64> {
        self.0.map_err(|shown| config_error(not_whole(name, &shown)))
    }
}

impl ShapeInt {
    pub fn of(number: i64) -> Self {
        Self(Ok(number))
    }

    /// The number, or an error with the argument's name.
    pub fn get(self, name: &str) -> PyResult<i64> {
        self.0.map_err(|shown| shape_error(not_whole(name, &shown)))
    }
}

fn not_whole(name: &str, shown: &str) -> String {
    format!("{name} must be a whole number of 64 bits, got {shown}")
}

/// The text of an argument for which Python's error says that it is no number, or does not fit. Any other error that the
/// argument's own methods raise, Ctrl-C included, is passed on.
fn shown(error: PyErr, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = value.py();
    let is_ours = error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyOverflowError>(py);
    if is_ours { value.repr().map(|text| text.to_string()) } else { Err(error) }
}

/// Replaces Python's error for such an argument by `refuse` of its text.
fn refused(error: PyErr, value: &Bound<'_, PyAny>, refuse: impl FnOnce(String) -> PyErr) -> PyErr {
    shown(error, value).map_or_else(|error| error, refuse)
}

/// The number, or the text of what was given in its place.
fn whole(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<i64, String>> {
    value.extract().map_or_else(|error| shown(error, &value).map(Err), |number| Ok(Ok(number)))
}

impl<'a, 'py> FromPyObject<'a, 'py> for ConfigInt {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole(value).map(Self)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for ShapeInt {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole(value).map(Self)
    }
}

/// A salt of the prefix index: `bytes`, and not more than one may have. Anything else is a `ShapeError`.
#[derive(Default)]
pub struct Salt(pub Vec<u8>);

impl<'a, 'py> FromPyObject<'a, 'py> for Salt {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let Ok(bytes) = value.cast::<PyBytes>() else {
            let shown = value.repr()?;
            return Err(shape_error(format!("a salt must be bytes, got {shown}")));
        };
        check_salt(bytes.as_bytes()).map_err(to_py)?;
        memory::copied(bytes.as_bytes(), "a salt").map(Self).map_err(to_py)
    }
}

/// One id or length that must be an `int32`.
pub fn int32(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i32> {
    value
        .extract()
        .map_err(|error| refused(error, value, |shown| shape_error(format!("{name} must be an int32, got {shown}"))))
}

/// The name of a request, of a ledger's row or of a pool's blocks.
pub fn name<'a>(tag: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let shown = || tag.repr().map(|shown| shown.to_string());
    let Ok(text) = tag.cast::<PyString>() else {
        return Err(shape_error(format!("a tag must be a str, got {}", shown()?)));
    };
    text.to_str().or_else(|_| Err(shape_error(format!("a tag must be text that UTF-8 can hold, got {}", shown()?))))
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
    value
        .extract()
        .map_err(|error| refused(error, value, |shown| to_py(Error::Order(format!("no step has the number {shown}")))))
}

/// A prefix's id.
pub fn prefix(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|error| refused(error, value, |shown| shape_error(format!("there is no prefix {shown}"))))
}

/// A count or index in `[least, 2^20]`.
pub fn count(name: &str, value: ShapeInt, least: i64) -> PyResult<usize> {
    let value = value.get(name)?;
    if (least..=MAX_COUNT).contains(&value) {
        return Ok(value as usize);
    }
    Err(shape_error(format!("{name} must be in [{least}, {MAX_COUNT}], got {value}")))
}

/// A size of `least` or more.
pub fn at_least(name: &str, value: ShapeInt, least: i64) -> PyResult<usize> {
    let value = value.get(name)?;
    usize::try_from(value)
        .ok()
        .filter(|_| value >= least)
        .ok_or_else(|| shape_error(format!("{name} must be {least} or more, got {value}")))
}

fn misaligned(name: &str) -> PyErr {
    shape_error(format!("{name} is not aligned in memory for its dtype"))
}

/// The entries of any array of the right type, strided or not.
fn elements<T: Element + Copy>(name: &str, array: &Bound<'_, PyArray1<T>>) -> PyResult<Vec<T>> {
    // SAFETY: the array is alive, and only its flags are read.
    let flags = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags };
    if flags & NPY_ARRAY_ALIGNED == 0 {
        return Err(misaligned(name));
    }
    // SAFETY: as above, and aligned. Nobody writes it meanwhile: the interpreter's lock is held, and no call of ours
    // lets it go. (`try_readonly` asks a table of all borrows, which takes longer than the copy.)
    let entries = unsafe { array.as_array() };
    expect_lanes(name, entries.len())?;
    let what = "the array of a batch";
    let copy = entries
        .as_slice()
        .map_or_else(|| memory::collected(entries.iter().copied(), what), |entries| memory::copied(entries, what));
    copy.map_err(to_py)
}

fn expect_lanes(name: &str, len: usize) -> PyResult<()> {
    if len <= MAX_LANES {
        return Ok(());
    }
    Err(shape_error(format!("{name} has {len} entries, at most {MAX_LANES} are taken")))
}

/// Each number as an int32, in the order of the batch.
fn narrowed(name: &str, numbers: &[i64]) -> PyResult<Vec<i32>> {
    // One pass without an exit serves the usual case.
    if numbers.iter().fold(false, |is_wrong, &number| is_wrong | (i64::from(number as i32) != number)) {
        let wrong = numbers.iter().find(|&&number| i32::try_from(number).is_err());
        return Err(shape_error(format!("{name} holds {}, which is no int32", wrong.copied().unwrap_or_default())));
    }
    memory::collected(numbers.iter().map(|&number| number as i32), "the array of a batch").map_err(to_py)
}

/// The `NumPy` array of a CPU tensor; nothing if the value is none.
fn tensor<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() || !value.hasattr("__array__")? {
        return Ok(None);
    }
    // A tensor of a device refuses.
    value.call_method0("__array__").map(Some)
}

/// `int32 [n]` from a `NumPy` array or CPU tensor of int32 or int64, or a sequence of ints; anything else is a
/// `ShapeError`.
pub fn int_array(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    // A list of a few numbers is usual, and each question whether it is an array takes as long as its numbers.
    if let Ok(list) = value.cast_exact::<PyList>()
        && let Some(numbers) = plain(list)?
    {
        return Ok(numbers);
    }
    if !value.is_instance_of::<PyList>() {
        if let Ok(array) = value.cast::<PyArray1<i32>>() {
            return elements(name, array);
        }
        if let Ok(array) = value.cast::<PyArray1<i64>>() {
            return match in_place(name, array)? {
                Some(numbers) => narrowed(name, numbers),
                None => narrowed(name, &elements(name, array)?),
            };
        }
        if let Ok(array) = value.cast::<PyUntypedArray>() {
            return Err(shape_error(format!(
                "{name} must be a 1-dimensional array of int32 or int64, got {} dimensions of {}",
                array.ndim(),
                array.dtype().str()?
            )));
        }
    }
    let refuse = |error| {
        refused(error, value, |shown| shape_error(format!("{name} must be an array or a list of ints, got {shown}")))
    };
    if let Some(array) = tensor(value).map_err(refuse)?
        && array.is_instance_of::<PyUntypedArray>()
    {
        return int_array(name, &array);
    }
    if let Ok(len) = value.len() {
        expect_lanes(name, len)?;
    }
    match value.extract::<List<i64>>() {
        Ok(numbers) => narrowed(name, &numbers.0),
        Err(error) => Err(refuse(error)),
    }
}

/// The numbers of a list, if each is an `int` that fits; none if [`int_array`] has to look closer.
fn plain(list: &Bound<'_, PyList>) -> PyResult<Option<Vec<i32>>> {
    let len = list.len();
    if len > MAX_LANES {
        return Ok(None);
    }
    let mut numbers = memory::with_room(len, "the array of a batch").map_err(to_py)?;
    for item in list.iter().take(len) {
        let Ok(number) = item.cast_exact::<PyInt>() else { return Ok(None) };
        let Ok(number) = number.extract::<i32>() else { return Ok(None) };
        numbers.push(number);
    }
    Ok(Some(numbers))
}

/// As [`int_array`], but an array that can be read as it lies is not copied.
pub fn ints<'a>(name: &str, value: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, [i32]>> {
    if value.is_exact_instance_of::<PyList>() {
        return int_array(name, value).map(Cow::Owned);
    }
    let Ok(array) = value.cast::<PyArray1<i32>>() else { return int_array(name, value).map(Cow::Owned) };
    in_place(name, array)?.map_or_else(|| elements(name, array).map(Cow::Owned), |entries| Ok(Cow::Borrowed(entries)))
}

/// The entries of an array that can be read as it lies; none of another one.
fn in_place<'a, T: Element>(name: &str, array: &'a Bound<'_, PyArray1<T>>) -> PyResult<Option<&'a [T]>> {
    // SAFETY: as in `elements`.
    let is_aligned = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags } & NPY_ARRAY_ALIGNED != 0;
    if !is_aligned || !array.is_c_contiguous() {
        return Ok(None);
    }
    expect_lanes(name, array.len())?;
    // SAFETY: as in `elements`, and contiguous. The argument lives longer than the call.
    Ok(Some(unsafe { std::slice::from_raw_parts(array.data(), array.len()) }))
}

/// The cells of a table that is written in place, and its shape. No other argument may be used while they are held:
/// the borrows that [`Output`] asks for take longer than a small step.
#[allow(clippy::mut_from_ref, reason = "the cells are NumPy's, not the borrow's")]
pub fn cells_mut<'a>(name: &str, table: &'a Bound<'_, PyAny>) -> PyResult<(&'a mut [i32], [usize; 2])> {
    let (array, dims) = take::<i32, 2>(name, table)?;
    // SAFETY: as in `elements`.
    let flags = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags };
    if flags & NPY_ARRAY_WRITEABLE == 0 {
        return Err(borrowed(name, &BorrowError::NotWriteable));
    }
    if flags & NPY_ARRAY_ALIGNED == 0 {
        return Err(misaligned(name));
    }
    // SAFETY: as in `in_place`; `take` has checked the dtype and the order, and the flags say that it may be written.
    Ok((unsafe { std::slice::from_raw_parts_mut(array.data(), array.len()) }, dims))
}

/// One number for each of `lanes` rows: the same for all, or an array.
pub fn per_row(name: &str, value: &Bound<'_, PyAny>, lanes: usize) -> PyResult<Vec<i32>> {
    if value.is_instance_of::<PyInt>() {
        return memory::filled(int32(name, value)?, lanes, "the array of a batch").map_err(to_py);
    }
    int_array(name, value)
}

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

/// The array itself and its shape, or a `ShapeError` that says what was expected and what was given.
fn take<'a, 'py, T: Element, const D: usize>(
    name: &str,
    object: &'a Bound<'py, PyAny>,
) -> PyResult<(&'a Bound<'py, PyArrayDyn<T>>, [usize; D])> {
    if let Ok(array) = object.cast::<PyArrayDyn<T>>()
        && let Ok(dims) = <[usize; D]>::try_from(array.shape())
        && array.is_c_contiguous()
    {
        return Ok((array, dims));
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

    pub fn span(&self) -> Span {
        Span::of(self.slice())
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

    pub fn span(&self) -> Span {
        Span::of(self.array.as_slice().unwrap_or_default())
    }
}

/// The memory range of an argument.
#[derive(Clone, Copy)]
pub struct Span {
    from: usize,
    to: usize,
}

impl Span {
    fn of<T>(slice: &[T]) -> Self {
        let from = slice.as_ptr() as usize;
        Self { from, to: from + size_of_val(slice) }
    }

    fn meets(self, other: Self) -> bool {
        self.from.max(other.from) < self.to.min(other.to)
    }
}

/// Refuses an output that shares memory with any other argument. (`try_readwrite` knows arrays and what they are views
/// of. It does not notice two arrays on one buffer that no array owns.)
pub fn expect_apart<const W: usize, const R: usize>(
    written: [(&'static str, Span); W],
    read: [(&'static str, Span); R],
) -> PyResult<()> {
    for (at, &(name, span)) in written.iter().enumerate() {
        if written[at + 1..].iter().chain(&read).any(|&(_, other)| span.meets(other)) {
            return Err(borrowed(name, &BorrowError::AlreadyBorrowed));
        }
    }
    Ok(())
}

/// Refuses an array of another shape than expected.
pub fn expect_dims<const D: usize>(name: &str, dims: [usize; D], expected: [usize; D]) -> PyResult<()> {
    if dims == expected {
        return Ok(());
    }
    Err(shape_error(format!("{name} must have shape {expected:?}, got {dims:?}")))
}

/// An array with one entry for each of `rows`.
pub fn per_lane<'py>(
    rows: &Input<'py, i32, 1>,
    name: &'static str,
    object: &Bound<'py, PyAny>,
) -> PyResult<Input<'py, i32, 1>> {
    let values = Input::new(name, object)?;
    expect_dims(name, values.dims, rows.dims)?;
    Ok(values)
}

/// A new one-dimensional array that takes over `values`.
pub fn vector<T: Element>(py: Python<'_>, values: Vec<T>) -> Bound<'_, PyArray1<T>> {
    PyArray1::from_vec(py, values)
}

/// A new one-dimensional array with the same values. For a few values this is faster than [`vector`].
pub fn copied<'py, T: Element + Copy>(py: Python<'py>, values: &[T]) -> PyResult<Bound<'py, PyArray1<T>>> {
    written(py, values.len(), |cells| cells.copy_from_slice(values))
}

/// A new one-dimensional array of int64 with the same values.
pub fn widened<'py>(py: Python<'py>, values: &[i32]) -> PyResult<Bound<'py, PyArray1<i64>>> {
    written(py, values.len(), |cells| cells.iter_mut().zip(values).for_each(|(cell, &value)| *cell = value.into()))
}

/// A new one-dimensional array, which `write` fills.
fn written<T: Element + Copy>(
    py: Python<'_>,
    len: usize,
    write: impl FnOnce(&mut [T]),
) -> PyResult<Bound<'_, PyArray1<T>>> {
    let mut dims = [len as npy_intp];
    // SAFETY: a new array of that length, written before anyone sees it; where there is no memory for it, an error.
    unsafe {
        let array = npyffi::PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            npyffi::get_type_object(py, npyffi::NpyTypes::PyArray_Type),
            T::get_dtype(py).into_dtype_ptr(),
            1,
            dims.as_mut_ptr(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
            std::ptr::null_mut(),
        );
        let array = Bound::from_owned_ptr_or_err(py, array)?.cast_into_unchecked::<PyArray1<T>>();
        write(array.as_slice_mut()?);
        Ok(array)
    }
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
    let elements = dims.iter().try_fold(1_usize, |product, &size| product.checked_mul(size.max(1)));
    if elements.is_none_or(|elements| elements > MAX_ELEMENTS) {
        return Err(shape_error(format!("an array of shape {dims:?} is too large, be it empty or not")));
    }
    PyArray1::from_vec(py, values).reshape(dims)
}

/// A read-only `NumPy` view of `data`, which lives in `owner` and is not moved while `owner` lives.
pub fn view<'py, T: Element>(data: &[T], owner: &Bound<'py, PyAny>) -> Bound<'py, PyArray1<T>> {
    // SAFETY: the array keeps `owner` alive, whose vectors keep their length and place; Python only reads.
    unsafe {
        let array = PyArray1::borrow_from_array(&ArrayView1::from(data), owner.clone());
        (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags &= !NPY_ARRAY_WRITEABLE;
        array
    }
}

/// As [`view`], with `columns` entries per line.
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
