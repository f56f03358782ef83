//! The Pubky SDK for Python: requests, sessions, locks, events. No policy, no retry, no format.
//!
//! `hpkfs_native.pyi` beside this crate is the interface and says what each part does.

mod call;
mod client;
mod failure;
mod paths;
mod runtime;
mod session;
mod streams;

use pyo3::prelude::*;

#[pymodule]
fn hpkfs_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("NativeError", failure::exception_type(py)?)?;
    module.add_class::<call::Call>()?;
    module.add_class::<client::Client>()?;
    module.add_class::<client::Login>()?;
    module.add_class::<session::Reader>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<session::Lock>()?;
    module.add_class::<session::Stats>()?;
    module.add_class::<session::Entry>()?;
    module.add_class::<streams::Download>()?;
    module.add_class::<streams::Upload>()?;
    module.add_class::<streams::Events>()?;
    module.add_class::<streams::Event>()?;
    runtime::stop_at_exit(py)
}
