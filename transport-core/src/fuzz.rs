//! The parsers of bytes that are not trusted, for the fuzzer only (`cfg(fuzzing)`).
//!
//! Each function takes any bytes. If the parser accepts them, the function asserts that the result stays the same when
//! it is written and read again, and that it is within its limits.

use tokio::runtime::Builder;

use crate::Descriptor;
use crate::control::frame::Frame;
use crate::control::framing::StreamReceiver;
use crate::control::handshake::hello::Hello;
use crate::control::{MAX_FRAME, RecvHalf};

/// The first frame of an unauthenticated peer.
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

/// The framing of a byte stream, up to its end or to the first bytes that are no frame.
pub fn stream(bytes: &[u8]) {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut receiver = StreamReceiver::new(bytes);
        while let Ok(frame) = receiver.recv().await {
            assert!(frame.len() <= MAX_FRAME);
        }
    });
}
