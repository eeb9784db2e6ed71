//! The parsers of bytes that are not trusted, for the fuzzer alone (`cfg(fuzzing)`).
//!
//! Each takes any bytes, and asserts what must hold of whatever was accepted: that
//! it survives being written and read again, and stays within its bounds.

use tokio::runtime::Builder;

use crate::Descriptor;
use crate::control::frame::Frame;
use crate::control::framing::StreamReceiver;
use crate::control::handshake::hello::Hello;
use crate::control::{MAX_FRAME, RecvHalf};

/// The first frame of a stranger.
pub fn hello(bytes: &[u8]) {
    if let Ok(hello) = Hello::decode(bytes) {
        let again = Hello::decode(&hello.encode().expect("what was read can be written"));
        assert_eq!(again.expect("what was written can be read"), hello);
    }
}

/// Every later control frame.
pub fn frame(bytes: &[u8]) {
    if let Ok(frame) = Frame::decode(bytes) {
        let again = Frame::decode(&frame.encode().expect("what was read can be written"));
        assert_eq!(again.expect("what was written can be read"), frame);
    }
}

/// A region's descriptor.
pub fn descriptor(bytes: &[u8]) {
    if let Ok(descriptor) = Descriptor::from_bytes(bytes) {
        let again = Descriptor::from_bytes(&descriptor.to_bytes());
        assert_eq!(again.expect("what was written can be read"), descriptor);
    }
}

/// The framing of a byte stream, up to its end or to what is no frame.
pub fn stream(bytes: &[u8]) {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut receiver = StreamReceiver::new(bytes);
        while let Ok(frame) = receiver.recv().await {
            assert!(frame.len() <= MAX_FRAME);
        }
    });
}
