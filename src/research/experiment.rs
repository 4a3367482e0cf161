//! One experiment, from the edit to the decision: each step is written down before it is taken, so that it can go on after a crash.

use crate::atomic_file::write_atomically;
use crate::process::{Interruption, ProcessId, kill_leftover};
use crate::research::crash::{Crash, CrashKind};
use crate::research::decision::{Status, Verdict};
use crate::research::journal::{Journal, Kind, Phase};
use crate::research::ledger::{Confirmation, Record, Seconds, id, one_line};
use crate::research::noise;
use crate::research::run_folders::{CONFIRMATIONS, put_aside, remove_weights, require_space};
use crate::research::study::{EDITABLE, Study, short};
use crate::research::training::{self, Run};
use crate::research::worktree::{self, Built};
use crate::run::Summary;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// An experiment in the making.
pub struct Experiment<'a> {
    study: &'a Study,
    interruption: &'a Interruption,
    journal: Journal,
    begun: Instant,
}

/// What the user asks of an experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Pairs of runs with new seeds for a gain that chance may explain.
    pub confirm: usize,
    /// Kept also where it is worse by no more than chance explains.
    pub simpler: bool,
}

/// An experiment that is over.
#[derive(Debug)]
pub struct Finished {
    pub record: Record,
    /// What went otherwise than usual, for the user.
    pub notes: Vec<String>,
}

impl<'a> Experiment<'a> {
    /// Begins one with the edit that the work tree, or the branch since the kept commit, has.
    ///
    /// # Errors
    /// If anything speaks against it: nothing is changed then.
    pub fn begin(
        study: &'a Study,
        interruption: &'a Interruption,
        description: &str,
        options: Options,
    ) -> Result<Self> {
        let description = one_line(description);
        ensure!(
            !description.is_empty(),
            "--message: expected what the experiment tries, found nothing; hint: -m \"…\""
        );
        study.require_finished()?;
        study.require_no_merge()?;
        study.require_within_bounds()?;
        let (parent, head) = (study.kept()?, study.repository.require_commit("HEAD")?);
        ensure!(
            study.repository.is_ancestor(&parent, &head)?,
            "HEAD: expected a commit on top of the kept one, {}, found {}; hint: `git reset --keep {}` goes there and keeps uncommitted edits",
            short(&parent),
            short(&head),
            short(&parent)
        );
        ensure!(
            !study.edited_since(&parent)?.is_empty(),
            "{}: expected an edit, found both as in the kept commit {}; hint: edit one; `noise` measures the same again",
            EDITABLE.join(" and "),
            short(&parent)
        );
        Self::new(study, interruption, Kind::Edit, description, parent, head, options)
    }

    /// Begins the baseline of a branch that has just been made.
    ///
    /// # Errors
    /// If there is no space, or the journal cannot be written.
    pub fn baseline(study: &'a Study, interruption: &'a Interruption) -> Result<Self> {
        study.require_finished()?;
        study.require_within_bounds()?;
        let start = study.start()?;
        Self::new(study, interruption, Kind::Baseline, "baseline".to_owned(), start.clone(), start, Options::default())
    }

    /// Begins to measure the commit of the experiment `number` again.
    ///
    /// # Errors
    /// If it was kept, or its parent is not the kept commit, or the work tree has an edit.
    pub fn retry(
        study: &'a Study,
        interruption: &'a Interruption,
        number: Option<u32>,
        options: Options,
    ) -> Result<Self> {
        study.require_finished()?;
        study.require_no_merge()?;
        study.require_within_bounds()?;
        let kept = study.require_no_edit()?;
        let records = study.ledger.records(&study.tag)?;
        let found = records.iter().rev().find(|record| number.is_none_or(|number| record.number == number));
        let Some(record) = found else {
            bail!("retry: expected an experiment of this branch, found none of that number; hint: `log` lists them");
        };
        ensure!(
            record.status != Status::Keep,
            "retry: expected an experiment that was not kept, found {}, which the branch has; hint: `noise` measures the kept commit again",
            record.id()
        );
        ensure!(
            record.crash.as_ref().is_none_or(|crash| crash.kind != CrashKind::Build),
            "retry: expected an experiment that compiles, found {}, which does not; hint: `git cherry-pick --no-commit {}` brings the edit back to be mended",
            record.id(),
            short(&record.commit)
        );
        let is_start = record.commit == kept && study.start()? == kept;
        ensure!(
            is_start || record.parent == kept && record.commit != kept,
            "retry: the branch has moved on since {}, which was an edit of {} and not of {}; hint: `git cherry-pick --no-commit {}` brings the edit here, then `experiment`",
            record.id(),
            short(&record.parent),
            short(&kept),
            short(&record.commit)
        );
        let original = record.description.trim_start_matches("retry: ").to_owned();
        let kind = if is_start { Kind::Baseline } else { Kind::Retry };
        let mut experiment =
            Self::new(study, interruption, kind, format!("retry: {original}"), kept.clone(), kept, options)?;
        experiment.journal.commit = Some(record.commit.clone());
        experiment.write_journal()?;
        Ok(experiment)
    }

    /// The unfinished experiment of the branch, if there is one: what is left of its processes is killed.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub fn resume(study: &'a Study, interruption: &'a Interruption) -> Result<Option<Self>> {
        let Some(journal) = Journal::read(&study.folder())? else { return Ok(None) };
        if let Some(child) = &journal.child {
            kill_leftover(child);
        }
        Ok(Some(Self { study, interruption, journal, begun: Instant::now() }))
    }

    fn new(
        study: &'a Study,
        interruption: &'a Interruption,
        kind: Kind,
        description: String,
        parent: String,
        head_before: String,
        options: Options,
    ) -> Result<Self> {
        require_space(study)?;
        let records = study.ledger.records(&study.tag)?;
        ensure!(
            records.iter().all(|record| record.status != Status::Keep) || study.best()?.is_some(),
            "{}: expected the kept commit {} among the experiments, found it in none; hint: `git update-ref {} COMMIT` points to the one that was kept last, see `log`",
            study.branch(),
            short(&parent),
            study.reference("kept")
        );
        let journal = Journal {
            number: study.next_number()?,
            kind,
            description,
            parent,
            head_before,
            commit: None,
            options,
            phase: Phase::Commit,
            child: None,
        };
        let experiment = Self { study, interruption, journal, begun: Instant::now() };
        put_aside(&experiment.run_dir())?;
        experiment.write_journal()?;
        Ok(experiment)
    }

    /// Goes on from the step that the journal names to the end.
    ///
    /// # Errors
    /// If git, the disk or the build's tools fail, or the user interrupts: the experiment stays unfinished then, except
    /// where its commit was refused, which leaves the edit as it was.
    pub fn finish(mut self) -> Result<Finished> {
        loop {
            self.journal.phase = match &self.journal.phase {
                Phase::Commit => match self.commit() {
                    Ok(commit) => {
                        self.journal.commit = Some(commit);
                        Phase::Measure
                    }
                    Err(error) => {
                        self.give_up()?;
                        return Err(error);
                    }
                },
                Phase::Measure => {
                    let record = self.measure()?;
                    let entries = self.study.ledger.entries(&record)?;
                    Phase::Record(Box::new(record), entries)
                }
                Phase::Record(record, entries) => {
                    self.study.ledger.append(entries)?;
                    Phase::Settle(record.clone())
                }
                Phase::Settle(record) => {
                    let record = (**record).clone();
                    let notes = self.settle(&record)?;
                    Journal::remove(&self.study.folder())?;
                    return Ok(Finished { record, notes });
                }
            };
            self.write_journal()?;
        }
    }

    /// Takes an unfinished experiment back: the branch is where it was, the edit stays in the work tree.
    ///
    /// # Errors
    /// If it was decided already, or git fails.
    pub fn take_back(mut self) -> Result<()> {
        if matches!(self.journal.phase, Phase::Record(..) | Phase::Settle(_)) {
            bail!("undo: expected an experiment without a result, found one; hint: `experiment --resume` finishes it");
        }
        // A commit that was made before it could be written down.
        let head = self.study.repository.require_commit("HEAD")?;
        if self.journal.commit.is_none() && self.is_own_commit(&head)? {
            self.journal.commit = Some(head);
        }
        self.give_up()
    }

    fn give_up(&self) -> Result<()> {
        let repository = &self.study.repository;
        if let Some(commit) = &self.journal.commit
            && *commit != self.journal.head_before
        {
            let branch = self.study.branch_reference();
            if repository.commit(&branch)?.as_ref() == Some(commit) {
                repository.set_reference(
                    &branch,
                    &self.journal.head_before,
                    Some(commit),
                    "autoresearch: taken back",
                )?;
                if repository.branch()?.as_ref() == Some(&self.study.branch()) {
                    repository.unstage(&self.journal.head_before, &EDITABLE)?;
                }
            }
        }
        if self.journal.kind == Kind::Edit {
            repository.delete_reference(&self.number_reference())?;
        }
        Journal::remove(&self.study.folder())
    }

    fn number_reference(&self) -> String {
        self.study.reference(&self.journal.number.to_string())
    }

    /// The run's folder.
    fn run_dir(&self) -> PathBuf {
        self.study.settings.runs_dir.join(id(&self.study.tag, self.journal.number))
    }

    fn write_journal(&self) -> Result<()> {
        self.journal.write(&self.study.folder())
    }

    /// Whether `head` is the commit that this experiment made before it could be written down.
    fn is_own_commit(&self, head: &str) -> Result<bool> {
        let repository = &self.study.repository;
        Ok(self.journal.kind == Kind::Edit
            && head != self.journal.head_before
            && repository.commit(&format!("{head}^"))?.as_deref() == Some(&self.journal.head_before)
            && repository.subject(head)? == self.journal.description)
    }

    fn commit(&self) -> Result<String> {
        let (repository, journal) = (&self.study.repository, &self.journal);
        ensure!(
            repository.branch()?.as_ref() == Some(&self.study.branch()),
            "HEAD: expected the branch {}, found another; hint: `git switch {}`",
            self.study.branch(),
            self.study.branch()
        );
        let head = repository.require_commit("HEAD")?;
        let commit = match journal.kind {
            Kind::Baseline => head,
            Kind::Retry => {
                let commit = journal.commit.clone();
                let commit = commit.context("retry: it was cut off before it had begun; hint: `retry` again")?;
                repository.set_reference(&self.study.branch_reference(), &commit, None, "autoresearch: retry")?;
                repository.restore(&commit, &EDITABLE)?;
                commit
            }
            Kind::Edit if self.is_own_commit(&head)? => head,
            Kind::Edit => match self.study.edited_since(&head)? {
                // The edit was committed by hand.
                edited if edited.is_empty() => head,
                edited => repository.commit_files(&edited, &journal.description)?,
            },
        };
        let foreign = repository.changed_between(&self.study.start()?, &commit, &EDITABLE)?;
        let edited = if journal.kind == Kind::Edit { self.study.edited_since(&commit)? } else { Vec::new() };
        if let Some(name) = foreign.first().map(String::as_str).or(edited.first().copied()) {
            if commit != journal.head_before {
                let (branch, why) = (self.study.branch_reference(), "autoresearch: taken back");
                repository.set_reference(&branch, &journal.head_before, Some(&commit), why)?;
                repository.unstage(&journal.head_before, &EDITABLE)?;
            }
            bail!(
                "{name}: expected the commit to have the edit and nothing else, found a difference; hint: a hook of this repository may change files, or an editor is at work: look at it and try again"
            );
        }
        repository.set_reference(&self.number_reference(), &commit, None, &journal.description)?;
        Ok(commit)
    }

    /// Builds, trains and decides.
    fn measure(&mut self) -> Result<Record> {
        let commit = self.journal.commit.clone().context("an experiment that is measured has a commit")?;
        let run_dir = self.run_dir();
        fs::create_dir_all(&run_dir).map_err(|error| {
            anyhow!("{}: cannot make the run's folder ({error}); hint: check that it may be written, or `start` with another --runs-dir", run_dir.display())
        })?;
        let patch = run_dir.join("edit.patch");
        write_atomically(&patch, self.study.repository.patch(&self.journal.parent, &commit)?.as_bytes())?;
        let best = self.study.best()?;
        let mut seconds = Seconds::default();

        let built = self.build(&commit, &run_dir.join("build.log"))?;
        seconds.build = built.duration.as_secs_f64();
        let outcome = match &built.program {
            Ok(program) => {
                if self.journal.kind == Kind::Baseline {
                    self.study.leave_program(program)?;
                }
                match self.study.check_built() {
                    Ok(()) => self.train(Run { program, commit: &commit, folder: &run_dir, seed: None })?,
                    Err(violation) => Err(Crash {
                        kind: CrashKind::Dishonest,
                        message: violation.to_string(),
                        excerpt: String::new(),
                    }),
                }
            }
            Err(first_error) => Err(Crash {
                kind: CrashKind::Build,
                message: "the edit does not compile".to_owned(),
                excerpt: first_error.clone(),
            }),
        };
        let noise = noise::largest_chance_difference(self.study, best.as_ref())?;
        let (verdict, confirmations) = match &outcome {
            Err(_) => (Verdict::Crash, Vec::new()),
            Ok(summary) => {
                let started = Instant::now();
                let (verdict, confirmations) = self.judge(summary, best.as_ref(), noise, &commit)?;
                if matches!(verdict, Verdict::Confirmed | Verdict::Unconfirmed) {
                    seconds.confirmation = started.elapsed().as_secs_f64();
                }
                (verdict, confirmations)
            }
        };
        let (summary, crash) = match outcome {
            Ok(summary) => (Some(summary), None),
            Err(crash) => (None, Some(crash)),
        };
        if let Some(summary) = &summary {
            seconds.start_up = summary.startup_seconds;
            seconds.training = summary.training_seconds;
            seconds.evaluation = summary.eval_seconds;
        }
        // Parts of it may have been done before a crash.
        let parts = seconds.build + seconds.start_up + seconds.training + seconds.evaluation + seconds.confirmation;
        seconds.total = self.begun.elapsed().as_secs_f64().max(parts);
        let of = |value: fn(&Summary) -> Option<f64>| summary.as_ref().and_then(value);
        Ok(Record {
            tag: self.study.tag.clone(),
            number: self.journal.number,
            commit,
            parent: self.journal.parent.clone(),
            description: self.journal.description.clone(),
            status: verdict.status(),
            verdict,
            val_bpb: of(|summary| Some(summary.val_bpb)),
            best_before: best.and_then(|best| best.val_bpb),
            noise,
            peak_vram_mb: of(|summary| summary.peak_vram_mb),
            crash,
            confirmations,
            seconds,
            tokens_per_second: of(|summary| Some(summary.tokens_per_second)),
            mfu_percent: of(|summary| summary.mfu_percent),
            num_steps: summary.as_ref().map(|summary| summary.num_steps),
            num_params_m: of(|summary| Some(summary.num_params_m)),
            seed: self.study.settings.seed,
            config: self.study.settings.config.clone(),
            config_sha256: self.study.settings.config_sha256.clone(),
            device: summary.as_ref().map_or(&self.study.settings.device, |summary| &summary.device).clone(),
            protocol: summary.map(|summary| summary.protocol),
            run_dir,
            patch,
            time: chrono::Local::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, false),
        })
    }

    fn judge(
        &mut self,
        summary: &Summary,
        best: Option<&Record>,
        noise: Option<f64>,
        commit: &str,
    ) -> Result<(Verdict, Vec<Confirmation>)> {
        if let Some(best) = best {
            let differences = match &best.protocol {
                Some(protocol) => protocol.differences(&summary.protocol),
                None => vec!["the best does not say how it was measured".to_owned()],
            };
            if !differences.is_empty() {
                return Ok((Verdict::Incomparable(differences), Vec::new()));
            }
        }
        let best = best.and_then(|best| best.val_bpb);
        let verdict = Verdict::of(summary.val_bpb, best, noise);
        let Options { confirm, simpler } = self.journal.options;
        let is_no_worse = best.is_some_and(|best| summary.val_bpb <= best + noise.unwrap_or_default());
        if simpler && verdict == Verdict::Worse && is_no_worse {
            return Ok((Verdict::Simpler, Vec::new()));
        }
        // Without a measured spread every gain may be chance.
        let is_doubtful = verdict == Verdict::Marginal || (verdict == Verdict::Gain && noise.is_none());
        if confirm == 0 || !is_doubtful {
            return Ok((verdict, Vec::new()));
        }
        // The first run of the commit was looked at because it was low: only the new ones are fair.
        let confirmations = self.confirm(commit)?;
        let is_better = confirms(&confirmations, noise);
        Ok((if is_better { Verdict::Confirmed } else { Verdict::Unconfirmed }, confirmations))
    }

    /// Trains both sides with the same new seeds; nothing if one of the runs gave no number.
    fn confirm(&mut self, commit: &str) -> Result<Vec<Confirmation>> {
        let folder = self.run_dir().join(CONFIRMATIONS);
        let parent = self.journal.parent.clone();
        let seeds: Vec<u64> =
            (1..=self.journal.options.confirm as u64).map(|add| self.study.settings.seed + add).collect();
        let mut sides: [Vec<f64>; 2] = Default::default();
        for (side, (name, commit)) in sides.iter_mut().zip([("edit", commit), ("best", &parent)]) {
            let built = self.build(commit, &self.run_dir().join("build.log"))?;
            let Ok(program) = &built.program else { return Ok(Vec::new()) };
            for seed in &seeds {
                let folder = folder.join(format!("{name}-{seed}"));
                let Ok(summary) = self.train(Run { program, commit, folder: &folder, seed: Some(*seed) })? else {
                    return Ok(Vec::new());
                };
                side.push(summary.val_bpb);
            }
        }
        let [edit, best] = sides;
        let runs = seeds.into_iter().zip(edit.into_iter().zip(best));
        Ok(runs.map(|(seed, (val_bpb, best))| Confirmation { seed, val_bpb, best }).collect())
    }

    /// Builds `commit`; gives the program, or the compiler's first error.
    fn build(&mut self, commit: &str, log: &Path) -> Result<Built> {
        let (study, interruption) = (self.study, self.interruption);
        worktree::build(study, commit, log, interruption, |child| self.at_work(child))
    }

    fn train(&mut self, run: Run) -> Result<std::result::Result<Summary, Crash>> {
        let (study, interruption) = (self.study, self.interruption);
        training::measure(study, run, interruption, |child| self.at_work(child))
    }

    /// Writes down which process is at work, so that it can be killed if this one cannot do it any more.
    fn at_work(&mut self, child: &ProcessId) -> Result<()> {
        self.journal.child = Some(*child);
        self.write_journal()
    }

    /// Moves the branch to where the decision leaves it.
    fn settle(&self, record: &Record) -> Result<Vec<String>> {
        let (repository, branch) = (&self.study.repository, self.study.branch_reference());
        let mut notes = Vec::new();
        if !self.study.settings.keep_weights {
            remove_weights(record)?;
        }
        if record.status == Status::Keep {
            repository.set_reference(&self.study.reference("kept"), &record.commit, None, &record.description)?;
            return Ok(notes);
        }
        if record.commit == record.parent {
            return Ok(notes);
        }
        match repository.commit(&branch)? {
            Some(head) if head == record.commit => {
                repository.set_reference(
                    &branch,
                    &record.parent,
                    Some(&record.commit),
                    &format!("autoresearch: {}", record.status),
                )?;
            }
            // Done before a crash.
            Some(head) if head == record.parent => {}
            _ => {
                notes.push(format!("{} was moved meanwhile and is left where it is", self.study.branch()));
                return Ok(notes);
            }
        }
        if repository.branch()?.as_ref() != Some(&self.study.branch()) {
            return Ok(notes);
        }
        for name in EDITABLE {
            if repository.is_as_in(&record.commit, name)? || repository.is_as_in(&record.parent, name)? {
                repository.restore(&record.parent, &[name])?;
            } else {
                repository.unstage(&record.parent, &[name])?;
                notes.push(format!(
                    "{name} was edited meanwhile and is left as it is, with this edit still in it (`git diff`)"
                ));
            }
        }
        Ok(notes)
    }
}

/// Whether runs with the same new seeds say that the edit is better: on average by more than chance explains for as many of them;
/// each time where that is not known.
fn confirms(runs: &[Confirmation], noise: Option<f64>) -> bool {
    let gains: Vec<f64> = runs.iter().map(|run| run.best - run.val_bpb).collect();
    let count = gains.len() as f64;
    match noise {
        _ if gains.is_empty() => false,
        Some(noise) => gains.iter().sum::<f64>() / count > noise / count.sqrt(),
        None => gains.iter().all(|gain| *gain > 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_seeds_confirm_a_gain_that_chance_does_not_explain() {
        let runs = |pairs: &[(f64, f64)]| {
            let run = |&(val_bpb, best): &(f64, f64)| Confirmation { seed: 1, val_bpb, best };
            pairs.iter().map(run).collect::<Vec<_>>()
        };
        // Of two pairs the mean must be above noise / √2.
        assert!(confirms(&runs(&[(1.0, 1.1), (1.0, 1.05)]), Some(0.1)));
        assert!(!confirms(&runs(&[(1.0, 1.1), (1.0, 1.04)]), Some(0.1)));
        assert!(confirms(&runs(&[(1.0, 1.001), (1.0, 1.002)]), None));
        assert!(!confirms(&runs(&[(1.0, 1.1), (1.0, 0.999)]), None));
        assert!(!confirms(&[], None) && !confirms(&[], Some(0.0)));
    }
}
