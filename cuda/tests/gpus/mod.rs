//! Whether there is a GPU.

use multirail_cuda::Device;
use multirail_spi::ErrorKind;

/// Why there is no GPU; `None` where there is one.
pub fn missing() -> Option<String> {
    let why = Device::all().err()?;
    assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
    Some(why.to_string())
}
