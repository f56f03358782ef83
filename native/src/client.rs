//! The pool of connections, and how a session is got: by a login or from an exported grant.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pubky::{
    AuthFlowKind, Capabilities, ClientId, GrantCredential, Pubky, PubkyGrantAuthFlow,
    PubkyHttpClient, PublicKey,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::call::{self, Call};
use crate::failure::Failure;
use crate::runtime;
use crate::session::{Reader, Session, Storage};

/// What all parts of one client share.
#[derive(Clone)]
pub struct Shared {
    pub sdk: Pubky,
    pub request_timeout: Duration,
    pub read_timeout: Duration,
}

impl Shared {
    /// Bound a whole request; the SDK has no bound of its own.
    pub async fn bounded<T, E: Into<Failure>>(
        &self,
        request: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(self.request_timeout, request).await {
            Ok(outcome) => outcome.map_err(Into::into),
            Err(_) => Err(Failure::new("timeout", "the request took too long")),
        }
    }
}

/// Bound the wait for the next part of an answer.
///
/// The HTTP library's own read timeout counts from the beginning of a request, so a long upload
/// would fail by it.
pub async fn heard<T, E: Into<Failure>>(
    silence_max: Duration,
    part: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(silence_max, part).await {
        Ok(outcome) => outcome.map_err(Into::into),
        Err(_) => Err(Failure::new("timeout", "the answer stopped")),
    }
}

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Client {
    settings: Settings,
    shared: Mutex<Option<Shared>>,
}

struct Settings {
    testnet_host: Option<String>,
    request_timeout: Duration,
    read_timeout: Duration,
    idle_connections_max: usize,
}

impl Client {
    /// The SDK's client, made at the first use: making it starts the runtime.
    fn shared(&self, py: Python<'_>) -> PyResult<Shared> {
        py.detach(|| {
            let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(made) = &*shared {
                return Ok(made.clone());
            }
            let runtime = runtime::handle().ok_or_else(|| Failure::new("closed", ""))?;
            let _inside = runtime.enter();
            let made = self.settings.build()?;
            *shared = Some(made.clone());
            Ok(made)
        })
        .map_err(|failure: Failure| failure.into_py(py))
    }
}

impl Settings {
    fn build(&self) -> Result<Shared, Failure> {
        let mut builder = PubkyHttpClient::builder();
        if let Some(host) = &self.testnet_host {
            builder.testnet_with_host(host);
        }
        let http = builder
            .pool_max_idle_per_host(self.idle_connections_max)
            .build()
            .map_err(pubky::Error::from)?;
        Ok(Shared {
            sdk: Pubky::with_client(http),
            request_timeout: self.request_timeout,
            read_timeout: self.read_timeout,
        })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (
        *, network, request_timeout_s, read_timeout_s, testnet_host=None, idle_connections_max=16
    ))]
    fn new(
        network: &str,
        request_timeout_s: f64,
        read_timeout_s: f64,
        testnet_host: Option<String>,
        idle_connections_max: usize,
    ) -> PyResult<Self> {
        let testnet_host = match (network, testnet_host) {
            ("mainnet", None) => None,
            ("mainnet", Some(_)) => {
                return Err(PyValueError::new_err(
                    "the main network has no host to choose",
                ));
            }
            ("testnet", host) => Some(host.unwrap_or_else(|| "localhost".to_owned())),
            _ => return Err(PyValueError::new_err("network is mainnet or testnet")),
        };
        let settings = Settings {
            testnet_host,
            request_timeout: call::seconds_of(request_timeout_s)?,
            read_timeout: call::seconds_of(read_timeout_s)?,
            idle_connections_max,
        };
        if settings.request_timeout.is_zero() || settings.read_timeout.is_zero() {
            return Err(PyValueError::new_err("a timeout is more than 0 seconds"));
        }
        Ok(Self {
            settings,
            shared: Mutex::new(None),
        })
    }

    #[pyo3(signature = (capabilities, *, client_id, relay=None))]
    fn start_login(
        &self,
        py: Python<'_>,
        capabilities: &str,
        client_id: &str,
        relay: Option<&str>,
    ) -> PyResult<Call> {
        let shared = self.shared(py)?;
        let parsed = (|| {
            let invalid =
                |what: &str| Failure::new("invalid", format!("{what} is not well formed"));
            let capabilities: Capabilities = capabilities
                .parse()
                .map_err(|_| invalid("the capability"))?;
            let client_id = ClientId::new(client_id).map_err(|_| invalid("the client id"))?;
            let relay = relay
                .map(|relay| url::Url::parse(relay).map_err(|_| invalid("the relay's address")))
                .transpose()?;
            Ok((capabilities, client_id, relay))
        })();
        let (capabilities, client_id, relay) = match parsed {
            Ok(parsed) => parsed,
            Err(failure) => return Ok(call::refused(failure)),
        };
        let started = async move {
            let mut flow =
                PubkyGrantAuthFlow::builder(&capabilities, AuthFlowKind::signin(), client_id)
                    .client(shared.sdk.client().clone());
            if let Some(relay) = relay {
                flow = flow.relay(relay);
            }
            let flow = flow.start()?;
            Ok(Login {
                url: flow.authorization_url().to_string(),
                flow: Arc::new(Mutex::new(Some(flow))),
                shared,
            })
        };
        call::start(py, started, |py, login| Ok(Py::new(py, login)?.into_any()))
    }

    fn restore(&self, py: Python<'_>, grant: String) -> PyResult<Call> {
        let shared = self.shared(py)?;
        // The SDK tells malformed text and an unknown homeserver by the same type.
        if GrantCredential::restore_encryption_keys(grant.trim()).is_err() {
            let failure = Failure::new("auth", "this is not an exported grant");
            return Ok(call::refused(failure));
        }
        let restored = async move {
            let session = shared
                .bounded(shared.sdk.restore_session(grant.trim()))
                .await?;
            Storage::of_session(shared, session).await
        };
        call::start(py, restored, Session::make)
    }

    fn public(&self, py: Python<'_>, owner: &str) -> PyResult<Reader> {
        let key = PublicKey::try_from_z32(owner)
            .map_err(|_| PyValueError::new_err("an owner is a public key in z-base-32"))?;
        Ok(Reader::new(Storage::public(self.shared(py)?, key)))
    }

    fn __repr__(&self) -> String {
        let host = self.settings.testnet_host.as_deref();
        format!("<Client of {}>", host.map_or("mainnet", |_| "testnet"))
    }
}

#[pyclass(frozen, module = "hpkfs_native")]
pub struct Login {
    url: String,
    flow: Arc<Mutex<Option<PubkyGrantAuthFlow>>>,
    shared: Shared,
}

#[pymethods]
impl Login {
    #[getter]
    fn url(&self) -> &str {
        &self.url
    }

    fn approval(&self, py: Python<'_>) -> PyResult<Call> {
        let flow = self
            .flow
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(flow) = flow else {
            return Ok(call::refused(Failure::new(
                "closed",
                "it was asked for before",
            )));
        };
        let shared = self.shared.clone();
        let approved = async move {
            let session = flow.await_approval().await?;
            Storage::of_session(shared, session).await
        };
        call::start(py, approved, Session::make)
    }

    fn __repr__(&self) -> &'static str {
        "<Login>"
    }
}
