//! Objects read or stored piece by piece, and the stream of changes.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use pubky::{EventCursor, EventStreamBuilder, EventType, PubkySession};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use reqwest::{Body, Response};
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::AbortHandle;

use crate::call::{self, Call};
use crate::client;
use crate::failure::Failure;
use crate::paths::{self, Access};
use crate::runtime;
use crate::session::Storage;

/// Pieces of an upload that wait to be sent.
const UPLOAD_QUEUE: usize = 4;
/// An event names one path; more than this is no event.
const EVENT_BYTES_MAX: usize = 64 * 1024;

fn closed() -> Failure {
    Failure::new("closed", "")
}

// -- reading -------------------------------------------------------------------------------

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Download {
    #[pyo3(get)]
    size: Option<u64>,
    response: Arc<Mutex<Option<Response>>>,
    closing: watch::Sender<bool>,
    silence_max: Duration,
}

impl Download {
    pub fn new(response: Response, silence_max: Duration) -> Self {
        Self {
            size: response.content_length(),
            response: Arc::new(Mutex::new(Some(response))),
            closing: watch::Sender::new(false),
            silence_max,
        }
    }
}

#[pymethods]
impl Download {
    fn read(&self, py: Python<'_>) -> PyResult<Call> {
        let (response, mut closing) = (Arc::clone(&self.response), self.closing.subscribe());
        let silence_max = self.silence_max;
        let next = async move {
            let mut response = response.lock().await;
            let reading = response.as_mut().ok_or_else(closed)?;
            let outcome = tokio::select! {
                chunk = client::heard(silence_max, reading.chunk()) => chunk,
                _ = closing.wait_for(|closing| *closing) => Err(closed()),
            };
            if !matches!(outcome, Ok(Some(_))) {
                *response = None;
            }
            outcome
        };
        call::start(py, next, |py, chunk| {
            Ok(PyBytes::new(py, &chunk.unwrap_or_default())
                .into_any()
                .unbind())
        })
    }

    fn close(&self, py: Python<'_>) {
        self.closing.send_replace(true);
        let response = Arc::clone(&self.response);
        py.detach(|| runtime::spawn(async move { *response.lock().await = None }));
    }
}

// -- storing -------------------------------------------------------------------------------

type Piece = Result<Bytes, std::io::Error>;
type Outcome = Option<Result<(), Failure>>;

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Upload {
    pieces: StdMutex<Option<mpsc::Sender<Piece>>>,
    outcome: watch::Receiver<Outcome>,
    task: AbortHandle,
}

impl Upload {
    pub fn start<F>(py: Python<'_>, store: impl FnOnce(Body) -> F) -> PyResult<Self>
    where
        F: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let (pieces, queue) = mpsc::channel::<Piece>(UPLOAD_QUEUE);
        let body = stream::unfold(queue, |mut queue| async move {
            queue.recv().await.map(|piece| (piece, queue))
        });
        let request = store(Body::wrap_stream(body));
        let (told, outcome) = watch::channel(None);
        let task = py.detach(|| {
            runtime::spawn(async move {
                let outcome = request.await;
                told.send_replace(Some(outcome));
            })
        });
        let task = task.ok_or_else(|| closed().into_py(py))?;
        Ok(Self {
            pieces: StdMutex::new(Some(pieces)),
            outcome,
            task: task.abort_handle(),
        })
    }

    fn pieces(&self) -> Option<mpsc::Sender<Piece>> {
        self.pieces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// How the request ended; a task that was aborted told nothing.
async fn ended(mut outcome: watch::Receiver<Outcome>) -> Result<(), Failure> {
    match outcome.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(closed())),
        Err(_) => Err(closed()),
    }
}

#[pymethods]
impl Upload {
    fn write(&self, py: Python<'_>, data: &[u8]) -> PyResult<Call> {
        let Some(pieces) = self.pieces() else {
            return Ok(call::refused(closed()));
        };
        let (piece, outcome) = (Bytes::copy_from_slice(data), self.outcome.clone());
        let sent = async move {
            match pieces.send(Ok(piece)).await {
                Ok(()) => Ok(()),
                // The request has ended before its body: its answer says why.
                Err(_) => ended(outcome).await.and(Err(closed())),
            }
        };
        call::start(py, sent, |py, ()| Ok(py.None()))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<Call> {
        let pieces = self
            .pieces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if pieces.is_none() {
            return Ok(call::refused(closed()));
        }
        drop(pieces);
        call::start(py, ended(self.outcome.clone()), |py, ()| Ok(py.None()))
    }

    fn abort(&self) {
        self.task.abort();
        self.pieces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let unfinished = self
            .pieces
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if unfinished.is_some() {
            self.task.abort();
        }
    }
}

// -- changes -------------------------------------------------------------------------------

pub struct Query {
    pub paths: Vec<String>,
    pub cursor: Option<String>,
    pub live: bool,
    pub limit: Option<u16>,
    pub reverse: bool,
}

impl Query {
    pub fn check(&self, storage: &Storage) -> Result<(), Failure> {
        let invalid = |what: &str| Err(Failure::new("invalid", what));
        if self.paths.is_empty() {
            return invalid("no path is given");
        }
        if self.live && self.reverse {
            return invalid("changes that are yet to come have no reverse order");
        }
        if self
            .cursor
            .as_ref()
            .is_some_and(|text| text.parse::<EventCursor>().is_err())
        {
            return invalid("this is no cursor");
        }
        for path in &self.paths {
            paths::check(path)?;
            storage.check(path, Access::Read)?;
        }
        Ok(())
    }

    pub async fn subscribe(
        self,
        storage: &Storage,
        session: &PubkySession,
    ) -> Result<Events, Failure> {
        let cursor = self.cursor.and_then(|text| text.parse().ok());
        let client = storage.client.sdk.client().clone();
        let mut query = EventStreamBuilder::for_user(client, &storage.owner, cursor)
            .session(session)
            .max_event_bytes(EVENT_BYTES_MAX);
        for path in self.paths {
            query = query.path(path);
        }
        if self.live {
            query = query.live();
        }
        if self.reverse {
            query = query.reverse();
        }
        if let Some(limit) = self.limit {
            query = query.limit(limit);
        }
        Ok(Events {
            changes: Arc::new(Mutex::new(Some(query.subscribe().await?))),
            closing: watch::Sender::new(false),
        })
    }
}

type Changes = Pin<Box<dyn Stream<Item = pubky::Result<pubky::Event>> + Send>>;

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Events {
    changes: Arc<Mutex<Option<Changes>>>,
    closing: watch::Sender<bool>,
}

#[pymethods]
impl Events {
    fn next(&self, py: Python<'_>) -> PyResult<Call> {
        let (changes, mut closing) = (Arc::clone(&self.changes), self.closing.subscribe());
        let next = async move {
            let mut changes = changes.lock().await;
            let reading = changes.as_mut().ok_or_else(closed)?;
            let outcome = tokio::select! {
                change = reading.next() => change,
                _ = closing.wait_for(|closing| *closing) => Some(Err(closed())).transpose()?,
            };
            match outcome {
                Some(Ok(change)) => Ok(Some(Event::from(change))),
                Some(Err(error)) => {
                    *changes = None;
                    Err(of_stream(error))
                }
                None => Ok(None),
            }
        };
        call::start(py, next, |py, event| match event {
            Some(event) => Ok(Py::new(py, event)?.into_any()),
            None => Ok(py.None()),
        })
    }

    fn close(&self, py: Python<'_>) {
        self.closing.send_replace(true);
        let changes = Arc::clone(&self.changes);
        py.detach(|| runtime::spawn(async move { *changes.lock().await = None }));
    }
}

/// The SDK reports a broken stream as a bad argument.
fn of_stream(error: pubky::Error) -> Failure {
    match error {
        pubky::Error::Request(pubky::errors::RequestError::Validation { .. }) => {
            Failure::new("connection", "the stream of changes broke")
        }
        other => other.into(),
    }
}

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Event {
    #[pyo3(get, name = "type")]
    kind: String,
    #[pyo3(get)]
    path: String,
    #[pyo3(get)]
    cursor: String,
    #[pyo3(get)]
    content_hash: Option<String>,
}

impl From<pubky::Event> for Event {
    fn from(event: pubky::Event) -> Self {
        let content_hash = match &event.event_type {
            EventType::Put { content_hash } => Some(STANDARD.encode(content_hash.as_bytes())),
            EventType::Delete => None,
        };
        Self {
            kind: if content_hash.is_some() {
                "put"
            } else {
                "delete"
            }
            .to_owned(),
            path: paths::decoded(event.resource.path.as_str()),
            cursor: event.cursor.to_string(),
            content_hash,
        }
    }
}
