//! The loop for any agent that a command line starts: prompt, edit, experiment, again; whatever the agent does, it goes on.

use crate::output::{say, tell};
use crate::process::{self, Ended, How, Input, Interruption, ProcessId, Supervision, kill_leftover};
use crate::research::decision::Status;
use crate::research::excerpt::{first_lines, read_end};
use crate::research::experiment::{Experiment, Finished, Options};
use crate::research::interruption::{Interrupted, pause};
use crate::research::journal::Journal;
use crate::research::ledger::{Record, one_line};
use crate::research::overview::{Order, Overview, Table, sorted};
use crate::research::state;
use crate::research::study::Study;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the file in a branch's folder.
const FILE: &str = "loop.json";
/// Longest pause after a round without an experiment; the first is a second, then it doubles.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Time for an agent to put things in order when it is asked to end.
const AGENT_GRACE: Duration = Duration::from_secs(5);
/// How an agent marks what its edit tries.
const MARK: &str = "EXPERIMENT:";

/// A loop, as it is written down: a killed one goes on from here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Command line of the agent, for the shell.
    pub agent: String,
    /// Ends then, in seconds of Unix time.
    pub until: Option<u64>,
    /// Ends after as many experiments.
    pub experiments: Option<usize>,
    /// Longest that the agent may take for one edit, in seconds.
    pub agent_limit_seconds: f64,
    /// Ends after as many rounds in turn that led to no experiment.
    pub most_idle: Option<usize>,
    /// As for `experiment`.
    pub options: Options,
    /// Number of its first experiment.
    pub first: u32,
    /// Rounds begun.
    pub rounds: usize,
    /// The agent's process, while it is at work.
    pub agent_process: Option<ProcessId>,
}

impl Plan {
    /// The one that was written down for the branch of `study`.
    ///
    /// # Errors
    /// If there is none.
    pub fn read(study: &Study) -> Result<Self> {
        let path = study.folder().join(FILE);
        let hint = "`loop --agent 'COMMAND'` starts one";
        let plan = state::read(&path, "an unfinished loop", hint)?;
        plan.ok_or_else(|| anyhow!("{}: expected an unfinished loop, found none; hint: {hint}", path.display()))
    }

    fn write(&self, study: &Study) -> Result<()> {
        state::write(&study.folder().join(FILE), self)
    }

    fn is_over(&self, done: usize) -> bool {
        self.experiments.is_some_and(|most| done >= most) || self.until.is_some_and(|until| unix_time() >= until)
    }
}

/// Whether a loop of the branch of `study` has not come to its end.
pub fn has_plan(study: &Study) -> bool {
    study.folder().join(FILE).exists()
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// How a round went.
#[derive(Debug)]
enum Round {
    /// It led to an experiment.
    Experiment(Box<Finished>),
    /// It did not; why.
    Idle(String),
}

/// A line of the loop's log.
#[derive(Serialize)]
struct LogLine<'a> {
    round: usize,
    time: String,
    experiment: Option<String>,
    status: Option<Status>,
    val_bpb: Option<f64>,
    idle: Option<&'a str>,
}

/// Goes on until `plan` is over. What was left unfinished before is finished first.
///
/// # Errors
/// If the user interrupts, the agent leads to no experiment too often in turn, or git or the disk fail for as long.
pub fn run(study: &Study, interruption: &Interruption, mut plan: Plan) -> Result<()> {
    if let Some(agent) = plan.agent_process.take() {
        kill_leftover(&agent);
    }
    plan.write(study)?;
    let mut last: Option<Round> = None;
    let mut idle = 0;
    loop {
        let is_unfinished = Journal::read(&study.folder())?.is_some();
        if !is_unfinished && plan.is_over(done(study, &plan)?) {
            break;
        }
        let round = if is_unfinished {
            finish_unfinished(study, interruption)
        } else {
            next_round(study, interruption, &mut plan, last.as_ref())
        };
        let round = match round {
            Ok(round) => round,
            Err(error) if error.is::<Interrupted>() => {
                bail!("the loop was stopped; hint: `loop --resume` goes on with it");
            }
            Err(error) => Round::Idle(format!("{error:#}")),
        };
        log(study, plan.rounds, &round);
        match &round {
            Round::Experiment(finished) => {
                idle = 0;
                say(format_args!("{} {}", time(), line(&finished.record)));
            }
            Round::Idle(why) => {
                idle += 1;
                say(format_args!("{} round {}: no experiment: {}", time(), plan.rounds, one_line(why)));
                ensure!(
                    plan.most_idle.is_none_or(|most| idle < most),
                    "loop: expected an experiment within {idle} rounds, found none; hint: the agent's words are in {}, `loop --resume` goes on",
                    agent_logs(study).display()
                );
                if !plan.is_over(done(study, &plan)?) {
                    let duration = LONGEST_PAUSE.min(Duration::from_secs(1 << (idle - 1).min(16)));
                    if pause(interruption, duration).is_err() {
                        bail!("the loop was stopped; hint: `loop --resume` goes on with it");
                    }
                }
            }
        }
        last = Some(round);
    }
    fs::remove_file(study.folder().join(FILE))
        .context("the loop's file cannot be removed; hint: check git's folder")?;
    say(format_args!("---\nended after {} rounds with {} experiments", plan.rounds, done(study, &plan)?));
    say(Overview::of(study)?);
    Ok(())
}

/// The time of day.
fn time() -> String {
    chrono::Local::now().format("%H:%M:%S").to_string()
}

/// Experiments of this loop that are in the ledger.
fn done(study: &Study, plan: &Plan) -> Result<usize> {
    Ok(study.ledger.records(&study.tag)?.iter().filter(|record| record.number >= plan.first).count())
}

fn finish_unfinished(study: &Study, interruption: &Interruption) -> Result<Round> {
    let experiment = Experiment::resume(study, interruption)?.context("an experiment is unfinished")?;
    Ok(Round::Experiment(Box::new(experiment.finish()?)))
}

fn next_round(study: &Study, interruption: &Interruption, plan: &mut Plan, last: Option<&Round>) -> Result<Round> {
    plan.rounds += 1;
    plan.write(study)?;
    let prompt = prompt(study, last)?;
    let logs = agent_logs(study);
    fs::create_dir_all(&logs)
        .map_err(|error| anyhow!("{}: cannot be made ({error}); hint: check that it may be written", logs.display()))?;
    let log = logs.join(format!("round-{:03}.log", plan.rounds));
    fs::write(log.with_extension("prompt.md"), &prompt)
        .map_err(|error| anyhow!("{}: cannot be written ({error}); hint: is there free space?", log.display()))?;
    let mut command = if cfg!(windows) { Command::new("cmd") } else { Command::new("sh") };
    command.arg(if cfg!(windows) { "/C" } else { "-c" }).arg(&plan.agent).current_dir(study.repository.root());
    let supervision = Supervision {
        limit: Duration::from_secs_f64(plan.agent_limit_seconds),
        grace: AGENT_GRACE,
        interruption: interruption.clone(),
    };
    tell(format_args!("round {}: the agent edits: {}", plan.rounds, log.display()));
    let ended = process::run(command, Input::Bytes(prompt.into_bytes()), &log, &supervision, |agent| {
        plan.agent_process = Some(*agent);
        plan.write(study)
    })?;
    plan.agent_process = None;
    plan.write(study)?;
    if ended.how == How::Interrupted {
        bail!(Interrupted);
    }
    if let Some(why) = unusable(&ended) {
        return Ok(Round::Idle(format!("the agent {why}; see {}", log.display())));
    }
    let description = description(&read_end(&log)).unwrap_or_else(|| format!("round {}", plan.rounds));
    match Experiment::begin(study, interruption, &description, plan.options) {
        Ok(experiment) => Ok(Round::Experiment(Box::new(experiment.finish()?))),
        Err(refusal) => Ok(Round::Idle(format!("{refusal:#}"))),
    }
}

/// Why what the agent did is not measured.
fn unusable(ended: &Ended) -> Option<String> {
    match ended.how {
        How::Exited(0) => None,
        How::TimedOut => Some(format!("took longer than {:.0} s and was ended", ended.wall.as_secs_f64())),
        how => Some(how.to_string()),
    }
}

/// What the agent says that its edit tries: the last line with the mark, or else its last words.
fn description(text: &str) -> Option<String> {
    let lines = || text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let marked = lines().find_map(|line| line.split_once(MARK).map(|(_, words)| words));
    let words = one_line(marked.or_else(|| lines().next())?);
    let words: String = words.chars().take(200).collect();
    (!words.is_empty()).then_some(words)
}

fn agent_logs(study: &Study) -> PathBuf {
    study.settings.runs_dir.join(format!("{}-agent", study.tag))
}

fn line(record: &Record) -> String {
    let why = record.crash.as_ref().map_or_else(|| record.verdict.to_string(), |crash| crash.kind.to_string());
    let number = record.val_bpb.map_or(String::new(), |val_bpb| format!(" val_bpb {val_bpb:.6}"));
    format!("{}: {} ({why}){number}: {}", record.id(), record.status, record.description)
}

/// Appends to the loop's log; one that cannot be written does not stop the loop.
fn log(study: &Study, round: usize, outcome: &Round) {
    let record = match outcome {
        Round::Experiment(finished) => Some(&finished.record),
        Round::Idle(_) => None,
    };
    let line = LogLine {
        round,
        time: chrono::Local::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, false),
        experiment: record.map(Record::id),
        status: record.map(|record| record.status),
        val_bpb: record.and_then(|record| record.val_bpb),
        idle: if let Round::Idle(why) = outcome { Some(why) } else { None },
    };
    let path = study.settings.runs_dir.join(format!("{}-loop.jsonl", study.tag));
    let written = serde_json::to_string(&line).map_err(anyhow::Error::from).and_then(|line| {
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(writeln!(file, "{line}")?)
    });
    if let Err(error) = written {
        tracing::warn!("{}: cannot be written ({error}); hint: the ledger has the experiments", path.display());
    }
}

/// What the agent is told.
fn prompt(study: &Study, last: Option<&Round>) -> Result<String> {
    let records = study.ledger.records(&study.tag)?;
    let mut text = format!(
        "You do language-model pretraining research: make val_bpb (validation bits per byte) lower. program.md in this folder is\n\
         the contract; here its loop is run for you. Make ONE change to src/model.rs or src/optim.rs, nothing else, and end. Do\n\
         not commit, train or run an experiment: that is done when you end, and the outcome comes with the next prompt. End your\n\
         answer with one line that says what the change tries:\n{MARK} <one sentence>\n\n# State\n{}\n",
        Overview::of(study)?.state()
    );
    let left = study.repository.difference(&study.kept()?)?;
    if !left.trim().is_empty() {
        // Of a round that led to no experiment, or a user's.
        write!(
            text,
            "\n# The files already differ from the kept commit\nWhat is in src/model.rs and src/optim.rs will be measured with your \
             change, unless you take it back; anything else must be as it was.\n{}\n",
            first_lines(&left)
        )?;
    }
    if let Err(problem) = study.require_within_bounds() {
        write!(text, "\n# Mend this first\n{problem:#}\n")?;
    }
    write!(text, "\n# Best\n{}\n", Table(&sorted(records.clone(), Order::Best, Some(5))))?;
    write!(text, "\n# Latest\n{}\n", Table(&sorted(records, Order::Time, Some(15))))?;
    match last {
        Some(Round::Experiment(finished)) => write!(text, "\n# Last outcome\n{finished}\n")?,
        Some(Round::Idle(why)) => write!(text, "\n# Last round led to no experiment\n{}\n", one_line(why))?,
        None => {}
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_the_marked_line_or_the_last_words() {
        let of = |text| description(text);
        assert_eq!(of("thinking\nEXPERIMENT: wider\tmodel\nbye\n").as_deref(), Some("wider model"));
        assert_eq!(of("first\n  deeper model \n\n").as_deref(), Some("deeper model"));
        assert_eq!(of("EXPERIMENT: one\n**EXPERIMENT:** two"), Some("** two".to_owned()));
        assert_eq!(of(" \n"), None);
        assert_eq!(of(&"x".repeat(500)).map(|words| words.len()), Some(200));
    }

    #[test]
    fn a_loop_is_over_after_its_experiments_or_its_time() {
        let plan = |experiments, until| Plan {
            agent: String::new(),
            until,
            experiments,
            agent_limit_seconds: 1.0,
            most_idle: None,
            options: Options::default(),
            first: 1,
            rounds: 0,
            agent_process: None,
        };
        assert!(plan(Some(2), None).is_over(2) && !plan(Some(2), None).is_over(1));
        assert!(plan(None, Some(unix_time())).is_over(0) && !plan(None, Some(unix_time() + 60)).is_over(100));
    }
}
