//! Messages: sent without knowing the receiver's memory, received into a pool.
//!
//! A *pool* keeps buffers posted for the messages of all peers. Dropping a message frees its
//! buffer. Here two workers ask one server to add numbers, and the server answers each through
//! its own connection.
//!
//! ```console
//! $ cargo run --example 03_send_recv_pools
//! ```

use std::collections::HashMap;
use std::error::Error;

use multirail::{Access, Fabric, Peer, SendOptions};

const WORKERS: u32 = 2;
const QUESTIONS: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let server = multirail::open()?;
    let mut workers = Vec::new();
    let mut peers = HashMap::new();
    for _ in 0..WORKERS {
        let worker = multirail::open()?;
        let (to_server, to_worker) = worker.connect_local(&server)?;
        peers.insert(to_worker.id(), to_worker);
        workers.push((worker, to_server));
    }

    let answers = std::thread::scope(|scope| {
        let serving = scope.spawn(|| pollster::block_on(serve(&server, &peers)));
        let asking: Vec<_> = workers
            .iter()
            .map(|(fabric, to_server)| scope.spawn(|| pollster::block_on(ask(fabric, to_server))))
            .collect();
        let mut answers = Vec::new();
        for worker in asking {
            answers.push(worker.join().map_err(|_| "a worker panicked")??);
        }
        serving.join().map_err(|_| "the server panicked")??;
        Ok::<_, Box<dyn Error>>(answers)
    })?;
    assert_eq!(answers, [(0..QUESTIONS).map(|n| n + n * n).sum(); WORKERS as usize]);
    println!("{WORKERS} workers had {QUESTIONS} answers each");
    Ok(())
}

/// Answers every question through the peer that asked.
async fn serve(fabric: &Fabric, peers: &HashMap<multirail::PeerId, Peer>) -> multirail::Result<()> {
    // Four buffers are enough for any number of messages: senders wait until one is free.
    let questions = fabric.recv_pool(4, 8)?;
    let answer = fabric.alloc(4, Access::LOCAL)?;
    for _ in 0..WORKERS * QUESTIONS {
        let question = questions.next().await?;
        let mut numbers = [0; 8];
        question.copy_out(&mut numbers);
        let [a, b] =
            [[0, 1, 2, 3], [4, 5, 6, 7]].map(|at| u32::from_le_bytes(at.map(|at: usize| numbers[at])));
        answer.copy_in(0, &(a + b).to_le_bytes())?;
        // The imm is the number of the question.
        let options = SendOptions::new().imm(question.imm().unwrap_or_default());
        peers[&question.peer()].send_with(&answer, 0..4, &options)?.await?;
    }
    Ok(())
}

/// Asks for n + n² for many n, and returns the sum of the answers.
async fn ask(fabric: &Fabric, server: &Peer) -> multirail::Result<u32> {
    let question = fabric.alloc(8, Access::LOCAL)?;
    let answer = fabric.alloc(4, Access::LOCAL)?;
    let mut sum = 0;
    for n in 0..QUESTIONS {
        // A single receive, posted before the question, is an alternative to a pool.
        let answered = fabric.recv(&answer, 0..4)?;
        question.copy_in(0, &n.to_le_bytes())?;
        question.copy_in(4, &(n * n).to_le_bytes())?;
        server.send_with(&question, 0..8, &SendOptions::new().imm(n))?.await?;
        assert_eq!(answered.await?.imm, Some(n));
        let mut bytes = [0; 4];
        answer.copy_out(0, &mut bytes)?;
        sum += u32::from_le_bytes(bytes);
    }
    Ok(sum)
}
