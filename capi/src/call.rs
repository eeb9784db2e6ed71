//! What every entry point runs in.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::*;
use crate::failure::{Answer, Failure};

/// Runs the body of an entry point. A panic of it becomes `MR_ERROR_PANIC`, because it must not reach C.
#[inline]
pub fn call(name: &'static str, body: impl FnOnce() -> Answer) -> mr_status {
    // What the body changes is behind locks that any thread may leave poisoned, and readable all the same.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => failure.report(),
        Err(panic) => panicked(name, panic).report(),
    }
}

#[cold]
fn panicked(name: &'static str, panic: Box<dyn std::any::Any + Send>) -> Failure {
    let known = panic.downcast_ref::<&str>().copied();
    let known = known.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let why = known.unwrap_or("no text").to_owned();
    // Dropping an unknown payload may panic again.
    std::mem::forget(panic);
    Failure::new(MR_ERROR_PANIC, format!("{name}: a fault of the library; please report it: {why}"))
}

/// Defines functions of `multirail.h`. Each body returns an [`Answer`].
macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        #[allow(unsafe_code, reason = "a symbol of the C interface; no other crate has its prefix")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $kind),*) -> $crate::abi::mr_status {
            $crate::call::call(stringify!($name), move || $body)
        }
    )*};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::last_text;

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(call("mr_test", || panic!("of the test")), MR_ERROR_PANIC);
        let text = last_text(str::to_owned);
        assert!(text.contains("mr_test") && text.contains("of the test"), "{text}");
        assert_eq!(call("mr_test", || std::panic::panic_any(7)), MR_ERROR_PANIC);
        assert_eq!(call("mr_test", || Ok(MR_PENDING)), MR_PENDING);
    }
}
