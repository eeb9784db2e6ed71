//! When cards' backends stage, as the environment wants it.

use std::sync::Arc;

use ::staging::Staged;
use transport_core::Staging;
use transport_core::spi::Backend;

use crate::environment::given;
use crate::registry::Absent;

/// The environment variable that says when memory that cards refuse is staged.
const STAGING: &str = "MULTIRAIL_STAGING";

/// A backend of cards that stages memory which they refuse if `MULTIRAIL_STAGING` says so, as [`Staged`] does: `1`,
/// `always`, or `0`, which is the default. Where it says anything else the backend is unavailable, and says so.
pub fn staged_if_asked(backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
    around(backend, &given(STAGING).unwrap_or_default())
}

fn around(backend: Arc<dyn Backend>, text: &str) -> Arc<dyn Backend> {
    match text.parse() {
        Ok(Staging::Never) => backend,
        Ok(staging) => Arc::new(Staged::new(backend, staging)),
        Err(error) => Absent::misunderstood(backend.name(), STAGING, &error),
    }
}

#[cfg(test)]
mod tests {
    use backend_loopback::Loopback;

    use super::*;

    #[test]
    fn what_is_not_understood_is_said() {
        let of = |text| around(Arc::new(Loopback::new()), text).probe();
        let why = of("perhaps").expect_err("unavailable");
        assert!(why.reason.contains(STAGING) && why.remedy.contains("0, 1 or always"), "{why:?}");
        let about = |text| of(text).expect("devices")[0].about.clone();
        assert_eq!(about("0"), about(""));
        assert!(about("1").ends_with(", staged where refused") && about("always").ends_with(", all staged"));
    }
}
