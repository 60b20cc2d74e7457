//! Creates the groups of a profile.

use crate::{Info, Machine, Profile, Result, Session};
use nix::unistd::Uid;

/// Creates the groups of `profile` on `machine`, and lets `user` move their own threads into them. Returns a line for each group and for
/// each deviation from the profile.
///
/// # Errors
/// The first failure. Dropping the session then undoes all changes.
pub fn prepare(session: &mut Session, profile: &Profile, machine: &Machine, user: Option<Uid>) -> Result<Vec<String>> {
    let info: Info = session.tree().info()?;
    let default = session.tree().schemata(&crate::GroupPath::root())?;
    let (groups, mut lines) = profile.fit(machine, &info, &default)?;
    for group in &groups {
        session.create(&group.path)?;
        if !group.schemata.lines.is_empty() {
            let rounded = session.set_schemata(&group.path, &group.schemata)?;
            lines.extend(
                rounded.iter().map(|r| format!("{}: {} of domain {} is {}, not {}", group.path, r.resource, r.domain, r.got, r.wanted)),
            );
        }
        if !group.cpus.is_empty() {
            session.add_cpus(&group.path, &group.cpus)?;
        }
        if let Some(user) = user {
            session.give_tasks_to(&group.path, user)?;
        }
        let cpus = if group.cpus.is_empty() { "no CPUs of its own".into() } else { format!("CPUs {}", group.cpus) };
        lines.push(format!("{}: {}, {cpus}", group.path, session.tree().schemata(&group.path)?));
    }
    Ok(lines)
}
