//! Reads and writes of one owner's storage.

use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, UNIX_EPOCH};

use pubky::{Capability, PubkySession, PublicKey, ResourceStats, StorageLock};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use reqwest::Response;

use crate::call::{self, Call};
use crate::client::{self, Shared};
use crate::failure::Failure;
use crate::paths::{self, Access};
use crate::streams;

const PAGE_MAX: u16 = 1000;

/// Where requests go: a session's storage, or what is public of an owner.
#[derive(Clone)]
pub struct Storage {
    pub client: Shared,
    pub owner: PublicKey,
    /// None for public reads.
    pub session: Option<Arc<PubkySession>>,
    pub capabilities: Arc<[Capability]>,
}

impl Storage {
    pub fn public(client: Shared, owner: PublicKey) -> Self {
        Self {
            client,
            owner,
            session: None,
            capabilities: Arc::new([]),
        }
    }

    /// A session with its exported grant. A cookie session is refused: it cannot be exported.
    pub async fn of_session(
        client: Shared,
        session: PubkySession,
    ) -> Result<(Self, String), Failure> {
        let grant = match session.as_grant() {
            Some(view) => view.export_local_secret().await,
            None => None,
        };
        let grant = grant.ok_or_else(|| Failure::new("auth", "this is not a grant's session"))?;
        let info = session.info();
        let storage = Self {
            client,
            owner: info.public_key().clone(),
            capabilities: info.capabilities().into(),
            session: Some(Arc::new(session)),
        };
        Ok((storage, grant))
    }

    pub fn check(&self, path: &str, access: Access) -> Result<(), Failure> {
        if self.session.is_some() {
            return paths::check_scope(&self.capabilities, path, access);
        }
        if path.starts_with("/pub/") {
            return Ok(());
        }
        Err(Failure::new(
            "scope",
            "only /pub/ can be read without a session",
        ))
    }

    fn address(&self, path: &str) -> String {
        format!("pubky{}{path}", self.owner.z32())
    }

    /// Begin to read an object; the answer's head is there.
    pub async fn response(&self, path: &str) -> Result<Response, Failure> {
        let begun = async {
            match &self.session {
                Some(session) => session.storage().get(path).await,
                None => {
                    let public = self.client.sdk.public_storage();
                    public.get(self.address(path)).await
                }
            }
        };
        let response = client::heard(self.client.read_timeout, begun).await?;
        // The HTTP library follows redirects; what it found elsewhere is not this object.
        let tail = response.url().path().rsplit('/').next().map(paths::decoded);
        if tail.as_deref() != path.rsplit('/').next() {
            return Err(Failure::new(
                "decode",
                "the homeserver sent the request elsewhere",
            ));
        }
        Ok(response)
    }

    async fn get(&self, path: &str, limit: usize) -> Result<Vec<u8>, Failure> {
        let mut response = self.response(path).await?;
        let too_long = || Failure::new("too-long", format!("more than {limit} bytes"));
        let announced = response.content_length().unwrap_or(0);
        if announced > limit as u64 {
            return Err(too_long());
        }
        let mut data = Vec::with_capacity(usize::try_from(announced).unwrap_or(0));
        while let Some(more) = client::heard(self.client.read_timeout, response.chunk()).await? {
            if data.len() + more.len() > limit {
                return Err(too_long());
            }
            data.extend_from_slice(&more);
        }
        Ok(data)
    }

    async fn stats(&self, path: &str) -> Result<ResourceStats, Failure> {
        let asked = async {
            match &self.session {
                Some(session) => session.storage().stats(path).await,
                None => {
                    let public = self.client.sdk.public_storage();
                    public.stats(self.address(path)).await
                }
            }
        };
        let found = client::heard(self.client.read_timeout, asked).await?;
        found.ok_or_else(|| Failure::http(404))
    }

    async fn list(&self, folder: &str, page: Page) -> Result<Vec<Entry>, Failure> {
        let session = self.session.as_ref().map(|session| session.storage());
        let public = self.client.sdk.public_storage();
        let mut request = match &session {
            Some(storage) => storage.list(folder)?,
            None => public.list(self.address(folder))?,
        };
        request = request
            .limit(page.limit)
            .reverse(page.reverse)
            .shallow(page.shallow);
        if let Some(cursor) = &page.cursor {
            request = request.cursor(cursor);
        }
        let lines = client::heard(self.client.read_timeout, request.send()).await?;
        let entry = |line: pubky::PubkyResource| {
            let as_told = percent_encoding::percent_decode_str(line.path.as_str());
            Entry {
                path: paths::decoded(line.path.as_str()),
                cursor: format!(
                    "pubky://{}{}",
                    line.owner.z32(),
                    as_told.decode_utf8_lossy()
                ),
            }
        };
        Ok(lines.into_iter().map(entry).collect())
    }

    /// Start a request that is bound by the request timeout.
    fn call<T, F, R, M>(&self, py: Python<'_>, request: R, make: M) -> PyResult<Call>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Failure>> + Send + 'static,
        R: FnOnce(Self) -> F,
        M: FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    {
        let client = self.client.clone();
        let request = request(self.clone());
        call::start(py, async move { client.bounded(request).await }, make)
    }
}

struct Page {
    limit: u16,
    cursor: Option<String>,
    reverse: bool,
    shallow: bool,
}

fn nothing(py: Python<'_>, (): ()) -> PyResult<Py<PyAny>> {
    Ok(py.None())
}

fn bytes(py: Python<'_>, data: Vec<u8>) -> PyResult<Py<PyAny>> {
    Ok(PyBytes::new(py, &data).into_any().unbind())
}

#[pyclass(frozen, subclass, module = "hpkfs_native")]
pub struct Reader {
    storage: Storage,
}

impl Reader {
    pub const fn new(storage: Storage) -> Self {
        Self { storage }
    }
}

#[pymethods]
impl Reader {
    #[getter]
    fn owner(&self) -> String {
        self.storage.owner.z32()
    }

    #[pyo3(signature = (path, *, limit))]
    fn get(&self, py: Python<'_>, path: String, limit: usize) -> PyResult<Call> {
        if let Err(failure) = readable(&self.storage, &path) {
            return Ok(call::refused(failure));
        }
        self.storage.call(
            py,
            |storage| async move { storage.get(&path, limit).await },
            bytes,
        )
    }

    fn open(&self, py: Python<'_>, path: String) -> PyResult<Call> {
        if let Err(failure) = readable(&self.storage, &path) {
            return Ok(call::refused(failure));
        }
        let silence_max = self.storage.client.read_timeout;
        self.storage.call(
            py,
            |storage| async move { storage.response(&path).await },
            move |py, response| {
                let download = streams::Download::new(response, silence_max);
                Ok(Py::new(py, download)?.into_any())
            },
        )
    }

    fn stats(&self, py: Python<'_>, path: String) -> PyResult<Call> {
        if let Err(failure) = readable(&self.storage, &path) {
            return Ok(call::refused(failure));
        }
        self.storage.call(
            py,
            |storage| async move { storage.stats(&path).await },
            |py, stats| Ok(Py::new(py, Stats::from(stats))?.into_any()),
        )
    }

    #[pyo3(signature = (folder, *, limit=PAGE_MAX, cursor=None, reverse=false, shallow=false))]
    fn list(
        &self,
        py: Python<'_>,
        folder: String,
        limit: u16,
        cursor: Option<String>,
        reverse: bool,
        shallow: bool,
    ) -> PyResult<Call> {
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(PyValueError::new_err("a page has 1 to 1000 entries"));
        }
        let allowed =
            paths::check_folder(&folder).and_then(|()| self.storage.check(&folder, Access::Read));
        if let Err(failure) = allowed {
            return Ok(call::refused(failure));
        }
        let page = Page {
            limit,
            cursor,
            reverse,
            shallow,
        };
        self.storage.call(
            py,
            |storage| async move { storage.list(&folder, page).await },
            |py, entries| {
                let entries: PyResult<Vec<_>> = entries
                    .into_iter()
                    .map(|entry| Py::new(py, entry))
                    .collect();
                Ok(entries?.into_pyobject(py)?.into_any().unbind())
            },
        )
    }

    fn __repr__(&self) -> String {
        format!("<storage of {}>", self.storage.owner.z32())
    }
}

fn readable(storage: &Storage, path: &str) -> Result<(), Failure> {
    paths::check_file(path)?;
    storage.check(path, Access::Read)
}

#[pyclass(frozen, extends = Reader, module = "hpkfs_native")]
pub struct Session {
    storage: Storage,
    session: Arc<PubkySession>,
    grant: String,
}

impl Session {
    pub fn make(py: Python<'_>, (storage, grant): (Storage, String)) -> PyResult<Py<PyAny>> {
        let session = storage.session.clone();
        let session = session.ok_or_else(|| PyValueError::new_err("no session"))?;
        let reader = PyClassInitializer::from(Reader::new(storage.clone()));
        let whole = reader.add_subclass(Self {
            storage,
            session,
            grant,
        });
        Ok(Py::new(py, whole)?.into_any())
    }

    fn writable(&self, path: &str) -> Result<(), Failure> {
        paths::check_file(path)?;
        self.storage.check(path, Access::Write)
    }

    /// Start a write to one path.
    fn write<T, F, R, M>(&self, py: Python<'_>, path: &str, request: R, make: M) -> PyResult<Call>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Failure>> + Send + 'static,
        R: FnOnce(Arc<PubkySession>) -> F,
        M: FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    {
        match self.writable(path) {
            Ok(()) => self.on_session(py, request, make),
            Err(failure) => Ok(call::refused(failure)),
        }
    }

    fn on_session<T, F, R, M>(&self, py: Python<'_>, request: R, make: M) -> PyResult<Call>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Failure>> + Send + 'static,
        R: FnOnce(Arc<PubkySession>) -> F,
        M: FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    {
        let session = Arc::clone(&self.session);
        self.storage.call(py, |_| request(session), make)
    }
}

#[pymethods]
impl Session {
    #[getter]
    fn capabilities(&self) -> Vec<String> {
        self.storage
            .capabilities
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    fn export_grant(&self) -> &str {
        &self.grant
    }

    fn refresh(&self, py: Python<'_>) -> PyResult<Call> {
        let renewed = |session: Arc<PubkySession>| async move {
            let view = session.as_grant();
            let view = view.ok_or_else(|| Failure::new("auth", "this is not a grant's session"))?;
            view.force_refresh().await?;
            Ok(())
        };
        self.on_session(py, renewed, nothing)
    }

    fn revalidate(&self, py: Python<'_>) -> PyResult<Call> {
        let asked =
            |session: Arc<PubkySession>| async move { Ok(session.revalidate().await?.is_some()) };
        self.on_session(py, asked, |py, known| {
            Ok(known.into_pyobject(py)?.to_owned().into_any().unbind())
        })
    }

    fn sign_out(&self, py: Python<'_>) -> PyResult<Call> {
        let signed_out = |session: Arc<PubkySession>| async move {
            let session = PubkySession::clone(&session);
            session.signout().await.map_err(|(error, _)| error.into())
        };
        self.on_session(py, signed_out, nothing)
    }

    fn put(&self, py: Python<'_>, path: String, data: &[u8]) -> PyResult<Call> {
        let data = data.to_vec();
        let checked = path.clone();
        let stored = |session: Arc<PubkySession>| async move {
            session.storage().put(path, data).await?;
            Ok(())
        };
        self.write(py, &checked, stored, nothing)
    }

    fn upload(&self, py: Python<'_>, path: String) -> PyResult<streams::Upload> {
        self.writable(&path)
            .map_err(|failure| failure.into_py(py))?;
        let session = Arc::clone(&self.session);
        streams::Upload::start(py, |body| async move {
            session.storage().put(path, body).await?;
            Ok(())
        })
    }

    fn delete(&self, py: Python<'_>, path: String) -> PyResult<Call> {
        let checked = path.clone();
        let removed = |session: Arc<PubkySession>| async move {
            session.storage().delete(path).await?;
            Ok(())
        };
        self.write(py, &checked, removed, nothing)
    }

    #[pyo3(signature = (path, *, seconds=30))]
    fn lock(&self, py: Python<'_>, path: String, seconds: u64) -> PyResult<Call> {
        let checked = path.clone();
        let locked = |session: Arc<PubkySession>| async move {
            let lock = session
                .storage()
                .lock(&path, Duration::from_secs(seconds))
                .await?;
            Ok(Lock {
                path,
                lock: RwLock::new(lock),
            })
        };
        self.write(py, &checked, locked, |py, lock| {
            Ok(Py::new(py, lock)?.into_any())
        })
    }

    fn put_locked(&self, py: Python<'_>, lock: &Lock, data: &[u8]) -> PyResult<Call> {
        let (held, data) = (lock.held(), data.to_vec());
        let stored = |session: Arc<PubkySession>| async move {
            session.storage().put_locked(&held, data).await?;
            Ok(())
        };
        self.write(py, &lock.path, stored, nothing)
    }

    fn delete_locked(&self, py: Python<'_>, lock: &Lock) -> PyResult<Call> {
        let held = lock.held();
        let removed = |session: Arc<PubkySession>| async move {
            session.storage().delete_locked(&held).await?;
            Ok(())
        };
        self.write(py, &lock.path, removed, nothing)
    }

    #[pyo3(signature = (lock, *, seconds=30))]
    fn refresh_lock(&self, py: Python<'_>, lock: Py<Lock>, seconds: u64) -> PyResult<Call> {
        let path = lock.get().path.clone();
        let mut held = lock.get().held();
        let kept = |session: Arc<PubkySession>| async move {
            let storage = session.storage();
            storage
                .refresh_lock(&mut held, Duration::from_secs(seconds))
                .await?;
            Ok(held)
        };
        self.write(py, &path, kept, move |py, held| {
            *lock
                .get()
                .lock
                .write()
                .unwrap_or_else(PoisonError::into_inner) = held;
            Ok(py.None())
        })
    }

    fn unlock(&self, py: Python<'_>, lock: &Lock) -> PyResult<Call> {
        let held = lock.held();
        let let_go = |session: Arc<PubkySession>| async move {
            session.storage().unlock(&held).await?;
            Ok(())
        };
        self.write(py, &lock.path, let_go, nothing)
    }

    #[pyo3(signature = (paths, *, cursor=None, live=true, limit=None, reverse=false))]
    fn events(
        &self,
        py: Python<'_>,
        paths: Vec<String>,
        cursor: Option<String>,
        live: bool,
        limit: Option<u16>,
        reverse: bool,
    ) -> PyResult<Call> {
        let query = streams::Query {
            paths,
            cursor,
            live,
            limit,
            reverse,
        };
        if let Err(failure) = query.check(&self.storage) {
            return Ok(call::refused(failure));
        }
        let session = Arc::clone(&self.session);
        self.storage.call(
            py,
            |storage| async move { query.subscribe(&storage, &session).await },
            |py, events| Ok(Py::new(py, events)?.into_any()),
        )
    }

    fn __repr__(&self) -> String {
        format!("<session of {}>", self.storage.owner.z32())
    }
}

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Lock {
    #[pyo3(get)]
    path: String,
    lock: RwLock<StorageLock>,
}

impl Lock {
    fn held(&self) -> StorageLock {
        self.lock
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

#[pymethods]
impl Lock {
    #[getter]
    fn seconds(&self) -> u64 {
        self.held().timeout().as_secs()
    }
}

#[pyclass(frozen, get_all, module = "hpkfs_native")]
pub struct Stats {
    size: Option<u64>,
    content_type: Option<String>,
    modified_at: Option<u64>,
    etag: Option<String>,
}

impl From<ResourceStats> for Stats {
    fn from(stats: ResourceStats) -> Self {
        let since = |time: std::time::SystemTime| time.duration_since(UNIX_EPOCH).ok();
        Self {
            size: stats.content_length,
            content_type: stats.content_type,
            modified_at: stats
                .last_modified
                .and_then(since)
                .map(|time| time.as_secs()),
            etag: stats.etag,
        }
    }
}

#[pyclass(frozen, get_all, module = "hpkfs_native")]
pub struct Entry {
    path: String,
    cursor: String,
}
