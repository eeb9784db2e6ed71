//! What C programs pass: pointers, each in a type that says what it points to and may be NULL until it was checked.
//!
//! Every `unsafe` block of this module rests on the contract of `multirail.h`: a pointer that is not NULL points to what
//! its parameter names, until the function returns, and no other thread writes it meanwhile. Only C makes values of
//! these types, as the parameters of entry points.

use std::ffi::{CStr, c_char, c_void};
use std::mem::size_of;
use std::slice;

use crate::abi::*;
use crate::failure::{Answer, Failure};

/// A struct that begins with its `size`, and consists of integers and pointers.
///
/// # Safety
/// The first member is a `u32`, and any bytes are a valid value.
pub unsafe trait Versioned: Copy {
    /// Its name in the header, and its initializer.
    const NAMES: (&'static str, &'static str);
}

// SAFETY: `size` comes first, and the others are integers, pointers and an optional function.
unsafe impl Versioned for mr_memory {
    const NAMES: (&'static str, &'static str) = ("mr_memory", "MR_MEMORY_INIT");
}
// SAFETY: as above.
unsafe impl Versioned for mr_transfer_options {
    const NAMES: (&'static str, &'static str) = ("mr_transfer_options", "MR_TRANSFER_OPTIONS_INIT");
}
// SAFETY: as above.
unsafe impl Versioned for mr_outcome {
    const NAMES: (&'static str, &'static str) = ("mr_outcome", "MR_OUTCOME_INIT");
}
// SAFETY: as above.
unsafe impl Versioned for mr_receipt {
    const NAMES: (&'static str, &'static str) = ("mr_receipt", "MR_RECEIPT_INIT");
}

/// The largest struct of a later version that is looked at.
const MAX_SIZE: usize = 4096;

/// Text that ends with NUL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// The text; `what` names the parameter in errors.
    pub fn read(&self, what: &str) -> Result<&str, Failure> {
        if self.0.is_null() {
            return Err(null(what));
        }
        // SAFETY: the module's contract: the text ends with NUL.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Failure::invalid(format!("{what} is not text in UTF-8")))
    }
}

/// Options of `mr_fabric_open`, as pairs of key and value.
pub fn pairs(options: &[mr_option]) -> Result<Vec<(&str, &str)>, Failure> {
    let pair = |(at, option): (usize, &mr_option)| {
        let text = |pointer: *const c_char, what: &str| {
            if pointer.is_null() {
                return Err(null(&format!("options[{at}].{what}")));
            }
            // SAFETY: the module's contract: the text ends with NUL, and lives as long as the options.
            let text = unsafe { CStr::from_ptr(pointer) };
            text.to_str().map_err(|_| Failure::invalid(format!("options[{at}].{what} is not text in UTF-8")))
        };
        Ok((text(option.key, "key")?, text(option.value, "value")?))
    };
    options.iter().enumerate().map(pair).collect()
}

/// Bytes; their number is a parameter of its own.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Bytes(*const c_void);

impl Bytes {
    pub fn read(&self, len: usize, what: &str) -> Result<&[u8], Failure> {
        // SAFETY: any bytes are valid, and the module's contract.
        unsafe { elements(self.0.cast(), len, what) }
    }
}

/// The bytes of a notification.
pub fn notification(options: &mr_transfer_options) -> Result<&[u8], Failure> {
    // SAFETY: any bytes are valid; the module's contract covers what a struct points to.
    unsafe { elements(options.notification.cast(), options.notification_len, "options.notification") }
}

/// The indices of pages. `None` if there is no list.
pub fn page_indices<'a>(pages: &'a mr_pages, count: usize, what: &str) -> Result<Option<&'a [u32]>, Failure> {
    if pages.indices.is_null() {
        return Ok(None);
    }
    // SAFETY: any four bytes are a number; the module's contract covers what a struct points to.
    unsafe { elements(pages.indices, count, what) }.map(Some)
}

/// An array of numbers, or of structs of numbers and pointers; the number of elements is a parameter of its own.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Entries<T>(*const T);

impl<T: Copy> Entries<T> {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn read(&self, count: usize, what: &str) -> Result<&[T], Failure> {
        // SAFETY: the entry points use it for structs of numbers and pointers, and the module's contract.
        unsafe { elements(self.0, count, what) }
    }
}

/// # Safety
/// Any bytes are a valid `T`, and the pointer is NULL or keeps the module's contract for `count` elements.
unsafe fn elements<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    check(pointer, what)?;
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::invalid(format!("{what} has {count} elements, more than memory has room for")));
    }
    // SAFETY: the pointer is aligned and not NULL, and the caller's contract.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// One struct.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Input<T>(*const T);

impl<T: Copy> Input<T> {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn read(&self, what: &str) -> Result<T, Failure> {
        check(self.0, what)?;
        // SAFETY: aligned and not NULL; the entry points use it for structs of numbers and pointers.
        Ok(unsafe { self.0.read() })
    }
}

impl<T: Versioned> Input<T> {
    /// A struct that may have more members than this library knows.
    pub fn read_versioned(&self, what: &str) -> Result<T, Failure> {
        check(self.0, what)?;
        // SAFETY: aligned and not NULL, and `size` is the first member.
        let size = unsafe { self.0.cast::<u32>().read() } as usize;
        check_size::<T>(size)?;
        // SAFETY: the caller's struct has `size` bytes, by the contract of `size`.
        let more =
            unsafe { slice::from_raw_parts(self.0.cast::<u8>().add(size_of::<T>()), size - size_of::<T>()) };
        if more.iter().any(|byte| *byte != 0) {
            let why = format!(
                "{} sets members that this library does not know; set them to 0, or update the library",
                T::NAMES.0
            );
            return Err(Failure::new(MR_ERROR_UNSUPPORTED, why));
        }
        // SAFETY: at least as many bytes as `T` has.
        Ok(unsafe { self.0.read() })
    }
}

/// Where a function writes a result; NULL where the header allows it.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Fails for NULL. Called before anything else is done.
    pub fn check(&self, what: &str) -> Result<(), Failure> {
        check(self.0, what)
    }

    /// Writes the result, if the caller wants it.
    pub fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the module's contract: the caller gives room for one `T`.
            unsafe { self.0.write(value) };
        }
    }

    /// Writes as many of the results as there is room for.
    pub fn set_all(&self, room: usize, values: impl IntoIterator<Item = T>) {
        for (at, value) in values.into_iter().take(room).enumerate() {
            // SAFETY: the module's contract: the caller gives room for `room` of them.
            unsafe { self.0.add(at).write(value) };
        }
    }
}

impl<T: Versioned> Out<T> {
    /// The struct as the caller has initialized it. Fails if it is smaller than this library's.
    pub fn read_versioned(&self, what: &str) -> Result<T, Failure> {
        check(self.0, what)?;
        // SAFETY: aligned and not NULL, and `size` is the first member, set by the caller.
        let size = unsafe { self.0.cast::<u32>().read() } as usize;
        check_size::<T>(size)?;
        // SAFETY: at least as many bytes as `T` has, initialized by the caller.
        Ok(unsafe { self.0.read() })
    }
}

/// Where a function writes text; its room is a parameter of its own.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct OutText(*mut c_char);

impl OutText {
    /// Writes text with its final NUL, or the beginning of it.
    pub fn write(&self, room: usize, needed: Out<usize>, text: &str) -> Answer {
        let length = self.write_some(room, text);
        needed.set(length);
        if length > room {
            let why = format!("the text has {length} bytes, and there is room for {room}");
            return Err(Failure::new(MR_ERROR_BUFFER, why));
        }
        Ok(MR_OK)
    }

    /// Writes as much as there is room for. Returns the bytes of the whole text, with its NUL.
    pub fn write_some(&self, room: usize, text: &str) -> usize {
        // A NUL inside would end the text early.
        let text = text.split('\0').next().unwrap_or_default();
        if room > 0 && !self.0.is_null() {
            let mut length = text.len().min(room - 1);
            while !text.is_char_boundary(length) {
                length -= 1;
            }
            // SAFETY: the module's contract: there is room for `room` bytes, which is more than `length`.
            unsafe {
                self.0.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length);
                self.0.add(length).write(0);
            }
        }
        text.len() + 1
    }
}

/// Where a function writes bytes; its room is a parameter of its own.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct OutBytes(*mut c_void);

impl OutBytes {
    /// Whether so many bytes can be written. If not, nothing is.
    pub fn has_room(&self, room: usize, bytes: &[u8]) -> bool {
        bytes.len() <= room && (bytes.is_empty() || !self.0.is_null())
    }

    pub fn write(&self, room: usize, needed: Out<usize>, bytes: &[u8]) -> Answer {
        needed.set(bytes.len());
        if !self.has_room(room, bytes) {
            let why = format!("there are {} bytes, and there is room for {room}", bytes.len());
            return Err(Failure::new(MR_ERROR_BUFFER, why));
        }
        if !bytes.is_empty() {
            // SAFETY: the module's contract: there is room for `room` bytes, which are no fewer.
            unsafe { self.0.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        Ok(MR_OK)
    }

    /// The room itself, to be filled.
    pub fn room(&mut self, room: usize, what: &str) -> Result<&mut [u8], Failure> {
        if room == 0 {
            return Ok(&mut []);
        }
        check(self.0.cast::<u8>(), what)?;
        // SAFETY: the module's contract: the caller gives so many bytes, and uses them in no other thread.
        Ok(unsafe { slice::from_raw_parts_mut(self.0.cast(), room) })
    }
}

fn check<T>(pointer: *const T, what: &str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(null(what));
    }
    if !pointer.is_aligned() {
        return Err(Failure::invalid(format!("{what} is not aligned as its type needs")));
    }
    Ok(())
}

fn check_size<T: Versioned>(size: usize) -> Result<(), Failure> {
    if (size_of::<T>()..=MAX_SIZE).contains(&size) {
        return Ok(());
    }
    let (name, initializer) = T::NAMES;
    Err(Failure::invalid(format!(
        "{name}.size is {size}, and at least {} is needed; begin with {initializer}",
        size_of::<T>()
    )))
}

#[cold]
fn null(what: &str) -> Failure {
    Failure::invalid(format!("{what} is NULL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(size: u32) -> mr_transfer_options {
        let (notification, notification_len) = (std::ptr::null(), 0);
        mr_transfer_options {
            size,
            flags: 0,
            deadline_ns: 0,
            imm: 9,
            paths: 0,
            notification,
            notification_len,
        }
    }

    #[test]
    fn structs_of_other_versions() {
        #[repr(C)]
        struct Later(mr_transfer_options, u64);
        let size = size_of::<Later>() as u32;
        let read = |later: &Later| Input(&raw const later.0).read_versioned("options").map(|read| read.imm);
        assert_eq!(read(&Later(options(size), 0)), Ok(9));
        assert_eq!(read(&Later(options(size), 1)).unwrap_err().status(), MR_ERROR_UNSUPPORTED);
        assert_eq!(read(&Later(options(8), 0)).unwrap_err().status(), MR_ERROR_INVALID_REQUEST);
        assert_eq!(read(&Later(options(u32::MAX), 0)).unwrap_err().status(), MR_ERROR_INVALID_REQUEST);
    }

    #[test]
    fn text_is_cut_at_a_character() {
        let mut room = [b'x'; 8];
        let mut needed = 0;
        let out = OutText(room.as_mut_ptr().cast());
        assert_eq!(out.write(3, Out(&raw mut needed), "aä€").unwrap_err().status(), MR_ERROR_BUFFER);
        assert_eq!((needed, &room[..3]), (7, &b"a\0x"[..]));
        assert_eq!(out.write(7, Out(&raw mut needed), "aä€"), Ok(MR_OK));
        assert_eq!(&room[..7], "aä€\0".as_bytes());
        assert_eq!(OutText(std::ptr::null_mut()).write_some(0, ""), 1);
    }

    #[test]
    fn pointers_that_are_none() {
        assert_eq!(Bytes(std::ptr::null()).read(0, "bytes"), Ok(&[][..]));
        assert_eq!(Bytes(std::ptr::null()).read(1, "bytes"), Err(null("bytes")));
        let odd = Entries(std::ptr::without_provenance::<u32>(1));
        assert_eq!(odd.read(1, "numbers").unwrap_err().status(), MR_ERROR_INVALID_REQUEST);
        let aligned = Entries(std::ptr::dangling::<u32>());
        assert_eq!(aligned.read(usize::MAX, "numbers").unwrap_err().status(), MR_ERROR_INVALID_REQUEST);
    }
}
