//! Paths of an owner's storage, and what a session's capabilities cover of them.

use percent_encoding::percent_decode_str;
use pubky::Capability;

use crate::failure::Failure;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// Refuse what a homeserver, or the SDK on the way, would understand as another path.
///
/// The SDK drops tabs and line ends, and takes `\` for `/`.
pub fn check(path: &str) -> Result<(), Failure> {
    let bad = |why: &str| Err(Failure::new("invalid", format!("the path {why}")));
    let Some(rest) = path.strip_prefix('/') else {
        return bad("does not begin with a slash");
    };
    if path.chars().any(|c| c.is_control() || c == '\\') {
        return bad("holds a control character or a backslash");
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return bad("holds an empty, `.` or `..` segment");
    }
    Ok(())
}

pub fn check_file(path: &str) -> Result<(), Failure> {
    check(path)?;
    if path.ends_with('/') {
        return Err(Failure::new("invalid", "the path is a folder's"));
    }
    Ok(())
}

pub fn check_folder(path: &str) -> Result<(), Failure> {
    check(path)?;
    if !path.ends_with('/') {
        return Err(Failure::new("invalid", "a folder's path ends with a slash"));
    }
    Ok(())
}

/// Refuse a path that no capability covers. A scope with a final slash is a whole folder, one
/// without it is one file.
pub fn check_scope(capabilities: &[Capability], path: &str, access: Access) -> Result<(), Failure> {
    let covers = |capability: &Capability| {
        let wanted = match access {
            Access::Read => 'r',
            Access::Write => 'w',
        };
        let allowed = capability.actions().iter().any(|a| char::from(a) == wanted);
        let scope = capability.scope().as_str();
        let inside = if scope.ends_with('/') {
            path.starts_with(scope)
        } else {
            path == scope
        };
        allowed && inside
    };
    if capabilities.iter().any(covers) {
        return Ok(());
    }
    Err(Failure::new(
        "scope",
        "the path is outside the session's capabilities",
    ))
}

/// The path of a listing's or an event's line. The SDK encodes once more what came encoded.
pub fn decoded(path: &str) -> String {
    let once = percent_decode_str(path).decode_utf8_lossy();
    percent_decode_str(&once).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capability(text: &str) -> Capability {
        text.parse().unwrap()
    }

    #[test]
    fn a_folder_covers_what_is_below_it_and_no_neighbour() {
        let granted = [capability("/priv/app/a/:rw")];
        for inside in ["/priv/app/a/", "/priv/app/a/x", "/priv/app/a/b/c"] {
            assert!(
                check_scope(&granted, inside, Access::Write).is_ok(),
                "{inside}"
            );
        }
        for outside in [
            "/priv/app/a",
            "/priv/app/ab",
            "/priv/app/",
            "/pub/app/a/x",
            "/",
        ] {
            let failure = check_scope(&granted, outside, Access::Read).unwrap_err();
            assert_eq!(failure.kind, "scope", "{outside}");
        }
    }

    #[test]
    fn a_file_covers_itself_only() {
        let granted = [capability("/priv/app/key:rw")];
        assert!(check_scope(&granted, "/priv/app/key", Access::Read).is_ok());
        assert!(check_scope(&granted, "/priv/app/key/x", Access::Read).is_err());
        assert!(check_scope(&granted, "/priv/app/keys", Access::Read).is_err());
    }

    #[test]
    fn reading_is_not_writing() {
        let granted = [capability("/priv/app/:r")];
        assert!(check_scope(&granted, "/priv/app/x", Access::Read).is_ok());
        assert!(check_scope(&granted, "/priv/app/x", Access::Write).is_err());
    }

    #[test]
    fn the_root_covers_all() {
        let granted = [capability("/:rw")];
        assert!(check_scope(&granted, "/priv/x", Access::Write).is_ok());
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        for bad in [
            "",
            "priv/x",
            "/priv//x",
            "/priv/../x",
            "/priv/./x",
            "/priv/x/..",
            "//priv/x",
            "/priv\\x",
            "/priv/x\n",
            "/priv/\tx",
            "/priv/\0",
            "/priv/x//",
        ] {
            assert_eq!(check(bad).unwrap_err().kind, "invalid", "{bad:?}");
        }
        for good in [
            "/priv/x",
            "/priv/x/",
            "/priv/%2e%2e/x",
            "/priv/ä b/日本",
            "/priv/..x",
        ] {
            assert!(check(good).is_ok(), "{good:?}");
        }
        assert!(check_file("/priv/x/").is_err());
        assert!(check_folder("/priv/x").is_err());
    }
}
