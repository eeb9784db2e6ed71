//! Finds out whether there is a GPU.

use multirail_cuda::Device;
use multirail_spi::ErrorKind;

/// The reason why there is no GPU. `None` if there is one.
pub fn missing() -> Option<String> {
    let why = Device::all().err()?;
    assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
    Some(why.to_string())
}
