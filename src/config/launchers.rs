//! Reads the environment variables of launchers: torchrun and compatible launchers, Open MPI, Slurm. They are defaults for the flags of
//! distributed runs. A flag that contradicts them is refused.

use super::settings::TrainOptions;
use crate::error::{Error, Result};

/// First port of Slurm jobs. The job number selects the port, which is not secret: the run token is. All ports lie below 32768, where the
/// system's ephemeral ports begin.
const SLURM_PORT: u64 = 20_000;
const SLURM_PORTS: u64 = 12_000;
/// Default port under Open MPI.
const MPI_PORT: &str = "29400";

/// Reads the environment.
type ReadVariable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A number from the environment, and the name of its variable.
#[derive(Clone, Copy)]
struct LauncherNumber {
    variable: &'static str,
    number: usize,
}

/// Process numbers and rendezvous address from a launcher's environment.
struct Launched {
    launcher: &'static str,
    processes: LauncherNumber,
    process: LauncherNumber,
    /// Local rank: index among the processes of this machine, if the launcher sets it.
    local: Option<LauncherNumber>,
    /// Rendezvous address, or the missing variable.
    address: std::result::Result<String, &'static str>,
}

impl TrainOptions {
    /// Fills the number of processes, the process index and the rendezvous address from the launcher where these options leave them open.
    ///
    /// # Errors
    /// `Usage` that names both numbers if a flag contradicts the launcher, an invalid variable, or a missing variable.
    pub(crate) fn under_launcher(mut self, variable: ReadVariable<'_>) -> Result<Self> {
        let Some(launched) = Launched::of(variable)? else {
            return match (self.processes, self.process) {
                (Some(processes @ 2..), None) => Err(Error::usage(format!(
                    "--processes {processes}: --process is missing; give each process its number, from 0 to {}, or start them with a \
                        launcher",
                    processes - 1
                ))),
                _ => Ok(self),
            };
        };
        launched.check("--processes", self.processes, launched.processes)?;
        launched.check("--process", self.process, launched.process)?;
        if self.rendezvous.is_none() {
            let missing =
                |variable| Error::usage(format!("{}: {variable} is missing; set it, or use --rendezvous HOST:PORT", launched.launcher));
            self.rendezvous = Some(launched.address.map_err(missing)?);
        }
        (self.processes, self.process) = (Some(launched.processes.number), Some(launched.process.number));
        Ok(self)
    }
}

/// The local rank, if the launcher sets it.
///
/// # Errors
/// `Usage` for an invalid variable.
pub(crate) fn local_process(variable: ReadVariable<'_>) -> Result<Option<usize>> {
    Ok(Launched::of(variable)?.and_then(|launched| launched.local).map(|local| local.number))
}

impl Launched {
    /// `None` without a launcher of several processes. Of nested launchers, the inner one is tried first: torchrun, Open MPI, Slurm.
    fn of(variable: ReadVariable<'_>) -> Result<Option<Self>> {
        for find in [of_torch, of_open_mpi, of_slurm] {
            if let Some(launched) = find(variable)?
                && launched.processes.number > 1
            {
                return Ok(Some(launched));
            }
        }
        Ok(None)
    }

    fn check(&self, flag: &str, given: Option<usize>, message: LauncherNumber) -> Result<()> {
        match given {
            Some(given) if given != message.number => Err(Error::usage(format!(
                "{flag} {given} contradicts {}={} of {}; leave the flag out, or unset the variable",
                message.variable, message.number, self.launcher
            ))),
            _ => Ok(()),
        }
    }
}

/// The number in the variable `name`, if it is set.
fn number(variable: ReadVariable<'_>, name: &'static str) -> Result<Option<LauncherNumber>> {
    let Some(text) = variable(name) else { return Ok(None) };
    let number = text.trim().parse().map_err(|_| Error::usage(format!("{name}={text:?}: not a number")))?;
    Ok(Some(LauncherNumber { variable: name, number }))
}

/// Processes of torchrun, and of launchers that set the same variables. The store of torchrun's agent listens on `MASTER_PORT`, so that
/// the rendezvous takes the next port.
fn of_torch(variable: ReadVariable<'_>) -> Result<Option<Launched>> {
    let (Some(process), Some(processes)) = (number(variable, "RANK")?, number(variable, "WORLD_SIZE")?) else { return Ok(None) };
    let port = number(variable, "MASTER_PORT")?;
    let agent_has_it = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let address = match (variable("MASTER_ADDR"), port) {
        (Some(host), Some(port)) => Ok(with_port(&host, port.number + usize::from(agent_has_it))),
        (None, _) => Err("MASTER_ADDR"),
        (_, None) => Err("MASTER_PORT"),
    };
    Ok(Some(Launched { launcher: "torchrun", processes, process, local: number(variable, "LOCAL_RANK")?, address }))
}

fn of_open_mpi(variable: ReadVariable<'_>) -> Result<Option<Launched>> {
    let (process, processes) = (number(variable, "OMPI_COMM_WORLD_RANK")?, number(variable, "OMPI_COMM_WORLD_SIZE")?);
    let (Some(process), Some(processes)) = (process, processes) else { return Ok(None) };
    let on_one_host = number(variable, "OMPI_COMM_WORLD_LOCAL_SIZE")?.is_some_and(|local| local.number == processes.number);
    let host = variable("MASTER_ADDR").or(on_one_host.then(|| "127.0.0.1".into()));
    let port = variable("MASTER_PORT").unwrap_or(MPI_PORT.into());
    let address = host.map(|host| with_port(&host, port)).ok_or("MASTER_ADDR");
    let local = number(variable, "OMPI_COMM_WORLD_LOCAL_RANK")?;
    Ok(Some(Launched { launcher: "Open MPI", processes, process, local, address }))
}

/// The tasks of a Slurm step, which `srun` starts. A batch script alone is no step.
fn of_slurm(variable: ReadVariable<'_>) -> Result<Option<Launched>> {
    let (process, processes) = (number(variable, "SLURM_PROCID")?, number(variable, "SLURM_STEP_NUM_TASKS")?);
    let (Some(process), Some(processes)) = (process, processes) else { return Ok(None) };
    let (job, step) = (number(variable, "SLURM_JOB_ID")?, number(variable, "SLURM_STEP_ID")?);
    let port = job.map(|job| SLURM_PORT + (job.number + step.map_or(0, |step| step.number)) as u64 % SLURM_PORTS);
    let address = match (variable("SLURM_STEP_NODELIST").and_then(|nodes| first_node(&nodes)), port) {
        (Some(host), Some(port)) => Ok(with_port(&host, port)),
        (None, _) => Err("SLURM_STEP_NODELIST"),
        (_, None) => Err("SLURM_JOB_ID"),
    };
    Ok(Some(Launched { launcher: "Slurm", processes, process, local: number(variable, "SLURM_LOCALID")?, address }))
}

/// An IPv6 address is set in brackets.
fn with_port(host: &str, port: impl std::fmt::Display) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The first name of a list such as `gpu[03-05,9],login1`.
fn first_node(nodes: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = nodes.trim();
    while let Some(at) = rest.find([',', '[']) {
        name.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            return Some(name).filter(|name| !name.is_empty());
        }
        let (ranges, after) = rest[at + 1..].split_once(']')?;
        name.push_str(ranges.split([',', '-']).next()?);
        rest = after;
    }
    name.push_str(rest);
    Some(name).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::tests::command_line;

    type Understood = (Option<usize>, Option<usize>, Option<String>);

    /// Processes, process and address of a process with these flags and variables.
    fn under(flags: &[&str], variables: &[(&str, &str)]) -> std::result::Result<Understood, String> {
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        let options = command_line(flags).unwrap().under_launcher(&variable).map_err(|e| e.to_string())?;
        Ok((options.processes, options.process, options.rendezvous))
    }

    const TORCH: [(&str, &str); 4] = [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")];
    const MPI: [(&str, &str); 3] = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
    const SLURM: [(&str, &str); 5] = [
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_NODELIST", "gpu[03-05,9],login1"),
        ("SLURM_JOB_ID", "41234"),
        ("SLURM_STEP_ID", "0"),
    ];

    #[test]
    fn each_launcher_is_understood() {
        let is = |processes, process, address: &str| Ok((Some(processes), Some(process), Some(address.to_string())));
        assert_eq!(under(&[], &TORCH), is(4, 1, "node1:29500"));
        assert_eq!(under(&[], &[&TORCH[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat()), is(4, 1, "node1:29501"));
        assert_eq!(under(&[], &MPI), is(2, 0, "127.0.0.1:29400"));
        assert_eq!(under(&[], &[&MPI[..2], &[("MASTER_ADDR", "fe80::1"), ("MASTER_PORT", "7")]].concat()), is(2, 0, "[fe80::1]:7"));
        assert_eq!(under(&[], &SLURM), is(4, 3, "gpu03:25234"));
        // torchrun within Slurm takes precedence.
        assert_eq!(under(&[], &[&SLURM[..], &TORCH].concat()), is(4, 1, "node1:29500"));
        assert_eq!(under(&["--rendezvous=here:1"], &SLURM), is(4, 3, "here:1"));
        assert_eq!(under(&["--processes=4", "--process=3"], &SLURM), is(4, 3, "gpu03:25234"));
    }

    /// The system assigns ephemeral ports from 32768 on, and may assign the rendezvous port to another connection.
    #[test]
    fn ports_of_slurm_lie_below_those_that_the_system_gives() {
        for job in [0, 11_999, 12_000, 41_234, 19_999, u32::MAX] {
            let job = job.to_string();
            let variables: Vec<_> =
                SLURM.iter().map(|&(name, value)| (name, if name == "SLURM_JOB_ID" { job.as_str() } else { value })).collect();
            let (_, _, address) = under(&[], &variables).unwrap();
            let port: u16 = address.unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
            assert!((20_000..32_000).contains(&port), "job {job}: {port}");
        }
    }

    #[test]
    fn the_local_rank_comes_from_the_launcher_that_started_the_process() {
        for (launched, name) in [(&TORCH[..], "LOCAL_RANK"), (&MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), (&SLURM, "SLURM_LOCALID")] {
            let local = |variables: &[(&str, &str)]| {
                local_process(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
            };
            assert_eq!(local(launched).unwrap(), None);
            assert_eq!(local(&[launched, &[(name, "3")]].concat()).unwrap(), Some(3), "{name}");
            assert_eq!(local(&[(name, "3")]).unwrap(), None, "a script under {name} starts processes itself");
            assert!(local(&[launched, &[(name, "x")]].concat()).is_err());
        }
    }

    #[test]
    fn one_process_and_a_batch_script_are_no_launch() {
        let one = [("RANK", "0"), ("WORLD_SIZE", "1"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "5")];
        for variables in [&one[..], &script, &[]] {
            assert_eq!(under(&[], variables), Ok((None, None, None)));
        }
    }

    #[test]
    fn contradictions_name_both_sides_and_missing_settings_are_named() {
        for (flags, variables, words) in [
            (&["--processes=2"][..], &TORCH[..], "--processes 2 contradicts WORLD_SIZE=4 of torchrun"),
            (&["--processes=1"], &SLURM, "--processes 1 contradicts SLURM_STEP_NUM_TASKS=4 of Slurm"),
            (&["--process=2"], &SLURM, "--process 2 contradicts SLURM_PROCID=3 of Slurm"),
            (&["--process=1"], &MPI, "--process 1 contradicts OMPI_COMM_WORLD_RANK=0 of Open MPI"),
            (&[], &TORCH[..3], "torchrun: MASTER_PORT is missing"),
            (&[], &[TORCH[0], TORCH[1], TORCH[3]], "torchrun: MASTER_ADDR is missing"),
            (&[], &MPI[..2], "Open MPI: MASTER_ADDR is missing"),
            (&[], &SLURM[..2], "Slurm: SLURM_STEP_NODELIST is missing"),
            (&[], &SLURM[..3], "Slurm: SLURM_JOB_ID is missing"),
            (&[], &[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK=\"x\": not a number"),
            (&["--processes=2"], &[], "--processes 2: --process is missing"),
        ] {
            let refused = under(flags, variables).unwrap_err();
            assert!(refused.starts_with(words), "{refused}");
        }
    }

    #[test]
    fn the_first_node_of_a_list() {
        for (nodes, first) in
            [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[07,09-10]x,b", "n07x"), ("r[1-2]n[3-4]", "r1n3"), ("a-1,b", "a-1")]
        {
            assert_eq!(first_node(nodes).as_deref(), Some(first), "{nodes}");
        }
        for nodes in ["", ",a", "n[1"] {
            assert_eq!(first_node(nodes), None, "{nodes}");
        }
    }
}
