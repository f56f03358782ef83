//! One tokio runtime for the process, started by the first call and stopped before Python ends.
//!
//! A process may fork before the first call, not after it: threads do not survive a fork.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

const WORKERS: usize = 2;
/// Name lookups of the system block; there are few of them at once.
const BLOCKING_THREADS_MAX: usize = 4;

enum State {
    NotStarted,
    Running(Runtime),
    Stopped,
}

static STATE: Mutex<State> = Mutex::new(State::NotStarted);
static CALLBACKS_RUNNING: AtomicUsize = AtomicUsize::new(0);

fn state() -> MutexGuard<'static, State> {
    // A panic while it was held left it whole: it is only ever replaced.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime, started where it is not yet; None once Python ends.
pub fn handle() -> Option<Handle> {
    let mut state = state();
    if matches!(*state, State::NotStarted) {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name("hpkfs-native")
            .enable_all()
            .build()
            .ok()?;
        *state = State::Running(runtime);
    }
    match &*state {
        State::Running(runtime) => Some(runtime.handle().clone()),
        _ => None,
    }
}

/// Run a future on the runtime, for callers outside it.
pub fn spawn<F>(future: F) -> Option<tokio::task::JoinHandle<F::Output>>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    handle().map(|handle| handle.spawn(future))
}

/// Run Python code on the calling thread, unless Python is about to end.
pub fn with_python(work: impl FnOnce(Python<'_>)) {
    {
        let state = state();
        if matches!(*state, State::Stopped) {
            return;
        }
        CALLBACKS_RUNNING.fetch_add(1, Ordering::SeqCst);
    }
    let _ = Python::try_attach(work);
    CALLBACKS_RUNNING.fetch_sub(1, Ordering::SeqCst);
}

/// Have the runtime stopped before the interpreter is taken down.
pub fn stop_at_exit(py: Python<'_>) -> PyResult<()> {
    let stop = pyo3::types::PyCFunction::new_closure(py, None, None, |arguments, _| {
        stop(arguments.py());
    })?;
    py.import("atexit")?.call_method1("register", (stop,))?;
    Ok(())
}

fn stop(py: Python<'_>) {
    py.detach(|| {
        let before = std::mem::replace(&mut *state(), State::Stopped);
        if let State::Running(runtime) = before {
            runtime.shutdown_background();
        }
        // A thread that is in a callback must leave Python before Python goes.
        while CALLBACKS_RUNNING.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}
