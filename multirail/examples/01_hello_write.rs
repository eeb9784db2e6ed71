//! The smallest complete program: one write from one fabric into another fabric's memory.
//!
//! It shows how memory is registered and described. An operation is a future for any executor,
//! or a thread can wait for it.
//!
//! ```console
//! $ cargo run --example 01_hello_write
//! ```

use std::error::Error;
use std::time::Duration;

use multirail::Access;

fn main() -> Result<(), Box<dyn Error>> {
    // Usually the fabrics are on two machines; here both are in this process. The backend is
    // chosen at run time, or by MULTIRAIL_BACKEND.
    let (alice, bob) = (multirail::open()?, multirail::open()?);
    let (to_bob, _to_alice) = alice.connect_local(&bob)?;

    // Bob registers memory that others may write. They need its descriptor: plain bytes, which
    // can be sent in any way.
    let mailbox = bob.alloc(4096, Access::REMOTE_WRITE)?;
    let descriptor = mailbox.descriptor();

    let text = b"hello, bob";
    let letter = alice.alloc(4096, Access::LOCAL)?;
    letter.copy_in(0, text)?;

    // Writes bytes 0..10 of the letter to byte 100 of the mailbox, without Bob's CPU.
    let remote = to_bob.import(&descriptor)?;
    let outcome = to_bob.write(&letter, 0..text.len(), &remote, 100)?.wait(Duration::from_secs(5))?;
    assert_eq!(outcome.bytes, 10);

    let mut received = vec![0; text.len()];
    mailbox.copy_out(100, &mut received)?;
    assert_eq!(received, text);
    println!("bob's mailbox says: {}", String::from_utf8_lossy(&received));

    // The same as a future. pollster is a very small executor; any other works too.
    pollster::block_on(async { to_bob.write(&letter, 0..5, &remote, 200)?.await })?;
    mailbox.copy_out(200, &mut received[..5])?;
    assert_eq!(&received[..5], b"hello");
    Ok(())
}
