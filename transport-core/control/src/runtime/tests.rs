//! The control thread, its branches, and their shutdown.

use super::*;

#[test]
fn tasks_run_elsewhere_and_all_are_gone_after_shutdown() {
    let thread = ControlThread::start(None, false).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let alive = Arc::new(());
    let (kept, spawner) = (Arc::clone(&alive), thread.spawner());
    thread.spawner().spawn(async move {
        sender.send(std::thread::current().name().map(str::to_owned)).unwrap();
        // Shutdown ends even a task that does not wait for `closing`.
        std::future::pending::<()>().await;
        drop(kept);
    });
    assert_eq!(receiver.recv().unwrap().as_deref(), Some("multirail-control"));
    spawner.spawn(async { panic!("a panic of one task does not affect the others") });
    thread.shutdown();
    thread.shutdown();
    assert_eq!(Arc::strong_count(&alive), 1);
    let late = Arc::clone(&alive);
    spawner.spawn(async move { drop(late) });
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn a_branch_ends_alone_and_its_tasks_may_send_first() {
    let thread = ControlThread::start(None, false).unwrap();
    let branch = thread.branch();
    let (sender, receiver) = std::sync::mpsc::channel();
    let (spawner, other) = (branch.spawner(), thread.spawner());
    let later = sender.clone();
    branch.spawner().spawn(async move {
        spawner.closing().await;
        // Shutdown also waits for a task that starts after it began.
        spawner.spawn(async move { later.send("goodbye").unwrap() });
    });
    let stuck = Arc::new(());
    let kept = Arc::clone(&stuck);
    branch.spawner().spawn(async move {
        std::future::pending::<()>().await;
        drop(kept);
    });
    branch.shutdown();
    assert_eq!(receiver.try_recv(), Ok("goodbye"));
    other.spawn(async move { sender.send("still here").unwrap() });
    assert_eq!(receiver.recv(), Ok("still here"));
    drop(branch);
    thread.shutdown();
    assert_eq!(Arc::strong_count(&stuck), 1);
}

#[test]
fn tasks_of_a_branch_may_send_first_when_it_is_dropped_on_the_thread_itself() {
    let thread = ControlThread::start(None, false).unwrap();
    let branch = thread.branch();
    let (sender, receiver) = std::sync::mpsc::channel();
    let (spawner, waiting) = (branch.spawner(), sender.clone());
    branch.spawner().spawn(async move {
        waiting.send("waiting").unwrap();
        spawner.closing().await;
        // A peer may take this long to read the final frame.
        sleep(CLOSE_LIMIT).await;
        waiting.send("goodbye").unwrap();
    });
    let (stuck, gone) = tokio::sync::oneshot::channel::<()>();
    branch.spawner().spawn(async move {
        std::future::pending::<()>().await;
        drop(stuck);
    });
    assert_eq!(receiver.recv(), Ok("waiting"));
    thread.spawner().spawn(async move { drop(branch) });
    drop(sender);
    assert_eq!(receiver.recv(), Ok("goodbye"));
    // The task that waits for ever is ended as well, while the thread goes on.
    assert!(gone.blocking_recv().is_err());
    thread.shutdown();
}

#[test]
fn may_be_dropped_on_itself_and_its_helpers() {
    for helper in [false, true] {
        let thread = ControlThread::start(None, false).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        thread.spawner().spawn(async move {
            // The thread is moved in only after it started this task.
            let thread: ControlThread = receiver.recv().unwrap();
            if helper {
                tokio::task::spawn_blocking(move || drop(thread)).await.unwrap();
            } else {
                drop(thread);
            }
        });
        let gone = thread.spawner();
        sender.send(thread).unwrap();
        while !gone.tasks.is_closed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
