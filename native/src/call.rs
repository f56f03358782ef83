//! A running request, as Python sees it: cancelled, waited for, or told by a callback.

use std::future::Future;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use crate::failure::Failure;
use crate::runtime;

/// How often a blocked thread looks whether it was interrupted.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// Makes the Python value of a result; it runs on the thread that asks for the result.
type Make = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

enum State {
    Running(Vec<Py<PyAny>>),
    Ended(Make),
    Made(Py<PyAny>),
    Failed(Failure),
}

pub struct Shared {
    state: Mutex<State>,
    ended: Condvar,
    task: OnceLock<AbortHandle>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::Running(Vec::new())),
            ended: Condvar::new(),
            task: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keep the result of the first to tell one; its callbacks.
    ///
    /// Whoever holds the lock never waits for Python, so Python may wait for the lock.
    fn settle(&self, outcome: Result<Make, Failure>) -> Vec<Py<PyAny>> {
        let mut state = self.lock();
        if !matches!(*state, State::Running(_)) {
            return Vec::new();
        }
        let ended = outcome.map_or_else(State::Failed, State::Ended);
        let State::Running(callbacks) = std::mem::replace(&mut *state, ended) else {
            return Vec::new();
        };
        self.ended.notify_all();
        callbacks
    }

    /// Settle from a thread of the runtime.
    fn finish(&self, outcome: Result<Make, Failure>) {
        let callbacks = self.settle(outcome);
        if !callbacks.is_empty() {
            runtime::with_python(|py| tell(py, callbacks));
        }
    }
}

fn tell(py: Python<'_>, callbacks: Vec<Py<PyAny>>) {
    for callback in callbacks {
        if let Err(error) = callback.call0(py) {
            error.write_unraisable(py, Some(callback.bind(py)));
        }
    }
}

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Call(Arc<Shared>);

/// Start a future; the call ends with what `make` does of its result.
pub fn start<T, F, M>(py: Python<'_>, future: F, make: M) -> PyResult<Call>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Failure>> + Send + 'static,
    M: FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
{
    let shared = Shared::new();
    let told = Arc::clone(&shared);
    let task = py.detach(|| {
        runtime::spawn(async move {
            let outcome = future.await;
            told.finish(outcome.map(|value| -> Make { Box::new(|py| make(py, value)) }));
        })
    });
    match task {
        Some(task) => {
            let _ = shared.task.set(task.abort_handle());
            Ok(Call(shared))
        }
        None => Err(Failure::new("closed", "Python is about to end").into_py(py)),
    }
}

/// A call that failed before anything was sent.
pub fn refused(failure: Failure) -> Call {
    let shared = Shared::new();
    shared.settle(Err(failure));
    Call(shared)
}

#[pymethods]
impl Call {
    #[classmethod]
    fn __class_getitem__(
        class: &Bound<'_, pyo3::types::PyType>,
        _of: &Bound<'_, PyAny>,
    ) -> Py<PyAny> {
        class.clone().into_any().unbind()
    }

    fn on_done(&self, py: Python<'_>, callback: Py<PyAny>) {
        {
            let mut state = self.0.lock();
            if let State::Running(callbacks) = &mut *state {
                callbacks.push(callback);
                return;
            }
        }
        tell(py, vec![callback]);
    }

    fn cancel(&self, py: Python<'_>) {
        let callbacks = py.detach(|| {
            let callbacks = self.0.settle(Err(Failure::new("cancelled", "")));
            if let Some(task) = self.0.task.get() {
                task.abort();
            }
            callbacks
        });
        tell(py, callbacks);
    }

    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        py.detach(|| !matches!(*self.0.lock(), State::Running(_)))
    }

    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let ended = {
            let mut state = self.0.lock();
            match &*state {
                State::Running(_) => {
                    return Err(PyRuntimeError::new_err("the call has not ended yet"));
                }
                State::Made(value) => return Ok(value.clone_ref(py)),
                State::Failed(failure) => return Err(failure.clone().into_py(py)),
                State::Ended(_) => {
                    let taken = Failure::new("closed", "the result is being taken elsewhere");
                    std::mem::replace(&mut *state, State::Failed(taken))
                }
            }
        };
        let State::Ended(make) = ended else {
            return Err(PyRuntimeError::new_err("the call has no result"));
        };
        let value = make(py)?;
        *self.0.lock() = State::Made(value.clone_ref(py));
        Ok(value)
    }

    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<Py<PyAny>> {
        let deadline = match timeout_s {
            Some(seconds) => Some(Instant::now() + seconds_of(seconds)?),
            None => None,
        };
        loop {
            let mut pause = SIGNALS_EVERY;
            if let Some(deadline) = deadline {
                pause = pause.min(deadline.saturating_duration_since(Instant::now()));
            }
            let ended = py.detach(|| {
                let state = self.0.lock();
                let waited = self
                    .0
                    .ended
                    .wait_timeout_while(state, pause, |state| matches!(state, State::Running(_)));
                !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            });
            if ended {
                return self.result(py);
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(PyTimeoutError::new_err("the call has not ended in time"));
            }
        }
    }
}

/// A time in seconds from Python.
pub fn seconds_of(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        pyo3::exceptions::PyValueError::new_err("a time is a number of seconds from 0 on")
    })
}
