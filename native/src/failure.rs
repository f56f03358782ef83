//! What failed, by type and status, never by words; and the Python exception that tells it.
//!
//! The text of a failure holds its kind, a status, and what the system said of a connection. No
//! URL and nothing a server sent goes into it: either may hold a secret.

use std::error::Error as _;

use pubky::errors::{CredentialRefreshError, PkarrError, RequestError, RequestErrorKind};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

pyo3::create_exception!(
    hpkfs_native,
    NativeError,
    PyException,
    "A call failed: `kind` says how, `status` what a homeserver answered."
);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: &'static str,
    pub status: Option<u16>,
    pub detail: String,
}

impl Failure {
    pub fn new(kind: &'static str, detail: impl Into<String>) -> Self {
        Self {
            kind,
            status: None,
            detail: detail.into(),
        }
    }

    pub fn http(status: u16) -> Self {
        Self::with_status("http", Some(status))
    }

    fn with_status(kind: &'static str, status: Option<u16>) -> Self {
        Self {
            kind,
            status,
            detail: String::new(),
        }
    }

    pub fn into_py(self, py: Python<'_>) -> PyErr {
        let mut text = self.kind.to_owned();
        if let Some(status) = self.status {
            text += &format!(" {status}");
        }
        if !self.detail.is_empty() {
            text += &format!(": {}", self.detail);
        }
        let error = NativeError::new_err(text);
        let value = error.value(py);
        let told = value
            .setattr("kind", self.kind)
            .and_then(|()| value.setattr("status", self.status));
        told.map_or_else(|unexpected| unexpected, |()| error)
    }
}

/// The class, with the attributes that an instance made in Python has as well.
pub fn exception_type(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static DONE: PyOnceLock<()> = PyOnceLock::new();
    let class = py.get_type::<NativeError>();
    DONE.get_or_try_init(py, || {
        class.setattr("kind", "other")?;
        class.setattr("status", py.None())
    })?;
    Ok(class)
}

impl From<pubky::Error> for Failure {
    fn from(error: pubky::Error) -> Self {
        use pubky::Error;
        match error {
            Error::Request(request) => request.into(),
            Error::CredentialRefresh(CredentialRefreshError::Request { status }) => {
                Self::with_status("refresh", status.map(|status| status.as_u16()))
            }
            Error::CredentialRefresh(_) => Self::with_status("refresh", None),
            Error::Pkarr(PkarrError::Resolve(_) | PkarrError::InvalidRecord(_)) => {
                Self::new("resolve", "the key's record could not be found or read")
            }
            Error::Authentication(_) => {
                Self::new("auth", "the approval or the grant is not valid any more")
            }
            Error::Parse(_) => Self::new("invalid", "not an address"),
            Error::Pkarr(_) | Error::Build(_) => Self::new("other", ""),
        }
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        let kind = error.kind();
        match (error, kind) {
            // Arguments were checked before, so what is left is a key without a homeserver.
            (RequestError::Validation { .. }, _) => {
                Self::new("resolve", "the owner's homeserver could not be found")
            }
            (RequestError::Transport(error), kind) => of_transport(kind, &error),
            (_, kind) => of_kind(kind),
        }
    }
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        of_transport(RequestErrorKind::from_transport(&error), &error)
    }
}

fn of_kind(kind: RequestErrorKind) -> Failure {
    match kind {
        RequestErrorKind::Http { status } => Failure::http(status),
        RequestErrorKind::Timeout => Failure::new("timeout", ""),
        RequestErrorKind::Connection => Failure::new("connection", ""),
        RequestErrorKind::Body => Failure::new("body", ""),
        RequestErrorKind::Decode => Failure::new("decode", ""),
        RequestErrorKind::InvalidRequest => Failure::new("invalid", ""),
        _ => Failure::new("other", ""),
    }
}

fn of_transport(kind: RequestErrorKind, error: &reqwest::Error) -> Failure {
    let mut failure = of_kind(kind);
    if failure.kind == "decode" && error.is_body() {
        failure.kind = "body";
    }
    failure.detail = innermost(error);
    failure
}

/// What the system said, if it said something: it knows of no URL and no header.
fn innermost(error: &reqwest::Error) -> String {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(system) = inner.downcast_ref::<std::io::Error>()
            && system.raw_os_error().is_some()
        {
            return system.to_string();
        }
        source = inner.source();
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_s_words_are_not_repeated() {
        let error = RequestError::Server {
            status: reqwest::StatusCode::UNAUTHORIZED,
            message: "your bearer abc is not known".into(),
        };
        let failure = Failure::from(pubky::Error::Request(error));
        assert_eq!(failure, Failure::http(401));
    }

    #[test]
    fn a_refused_refresh_keeps_its_status() {
        let error = CredentialRefreshError::Request {
            status: Some(reqwest::StatusCode::UNAUTHORIZED),
        };
        let failure = Failure::from(pubky::Error::CredentialRefresh(error));
        assert_eq!((failure.kind, failure.status), ("refresh", Some(401)));
    }

    #[test]
    fn an_unknown_owner_is_told_apart_from_bad_arguments() {
        let error = RequestError::Validation {
            message: "could not resolve homeserver".into(),
        };
        assert_eq!(Failure::from(error).kind, "resolve");
        let error = pubky::Error::Parse(url::ParseError::EmptyHost);
        assert_eq!(Failure::from(error).kind, "invalid");
    }

    #[tokio::test]
    async fn a_refused_connection_names_what_the_system_said() {
        let error = reqwest::get("http://127.0.0.1:1/secret").await.unwrap_err();
        let failure = Failure::from(error);
        assert_eq!(failure.kind, "connection");
        assert!(failure.detail.contains("refused"), "{}", failure.detail);
        assert!(!failure.detail.contains("secret"));
    }
}
