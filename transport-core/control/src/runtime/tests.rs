//! The control thread, its branches, and their ends.

use super::*;

#[test]
fn tasks_run_elsewhere_and_all_are_gone_after_shutdown() {
    let thread = ControlThread::start(None, false).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let alive = Arc::new(());
    let (kept, spawner) = (Arc::clone(&alive), thread.spawner());
    thread.spawner().spawn(async move {
        tell.send(std::thread::current().name().map(str::to_owned)).unwrap();
        // Even a task that does not watch for the end is ended.
        std::future::pending::<()>().await;
        drop(kept);
    });
    assert_eq!(told.recv().unwrap().as_deref(), Some("multirail-control"));
    spawner.spawn(async { panic!("one task's panic is no other's") });
    thread.shutdown();
    thread.shutdown();
    assert_eq!(Arc::strong_count(&alive), 1);
    let late = Arc::clone(&alive);
    spawner.spawn(async move { drop(late) });
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn a_branch_ends_alone_and_its_tasks_get_to_speak() {
    let thread = ControlThread::start(None, false).unwrap();
    let branch = thread.branch();
    let (tell, told) = std::sync::mpsc::channel();
    let (spawner, other) = (branch.spawner(), thread.spawner());
    let later = tell.clone();
    branch.spawner().spawn(async move {
        spawner.closing().await;
        // What is started on the way out is awaited too.
        spawner.spawn(async move { later.send("goodbye").unwrap() });
    });
    let stuck = Arc::new(());
    let kept = Arc::clone(&stuck);
    branch.spawner().spawn(async move {
        std::future::pending::<()>().await;
        drop(kept);
    });
    branch.shutdown();
    assert_eq!(told.try_recv(), Ok("goodbye"));
    other.spawn(async move { tell.send("still here").unwrap() });
    assert_eq!(told.recv(), Ok("still here"));
    drop(branch);
    thread.shutdown();
    assert_eq!(Arc::strong_count(&stuck), 1);
}

#[test]
fn tasks_of_a_branch_get_to_speak_when_it_is_dropped_on_the_thread_itself() {
    let thread = ControlThread::start(None, false).unwrap();
    let branch = thread.branch();
    let (tell, told) = std::sync::mpsc::channel();
    let (spawner, waiting) = (branch.spawner(), tell.clone());
    branch.spawner().spawn(async move {
        waiting.send("waiting").unwrap();
        spawner.closing().await;
        // As long as a peer may take to read it.
        sleep(CLOSE_LIMIT).await;
        waiting.send("goodbye").unwrap();
    });
    let (stuck, gone) = tokio::sync::oneshot::channel::<()>();
    branch.spawner().spawn(async move {
        std::future::pending::<()>().await;
        drop(stuck);
    });
    assert_eq!(told.recv(), Ok("waiting"));
    thread.spawner().spawn(async move { drop(branch) });
    drop(tell);
    assert_eq!(told.recv(), Ok("goodbye"));
    // Whoever has nothing to say is ended all the same, while the thread goes on.
    assert!(gone.blocking_recv().is_err());
    thread.shutdown();
}

#[test]
fn may_be_dropped_on_itself_and_its_helpers() {
    for helper in [false, true] {
        let thread = ControlThread::start(None, false).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        thread.spawner().spawn(async move {
            // The thread is moved in only after it started this task.
            let thread: ControlThread = told.recv().unwrap();
            if helper {
                tokio::task::spawn_blocking(move || drop(thread)).await.unwrap();
            } else {
                drop(thread);
            }
        });
        let gone = thread.spawner();
        tell.send(thread).unwrap();
        while !gone.tasks.is_closed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
