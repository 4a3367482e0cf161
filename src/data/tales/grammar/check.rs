//! Checking a grammar as a whole.

use super::read::Reader;
use super::{Choice, Form, Grammar, NAME, Node};
use anyhow::{Context, Result, bail, ensure};
use rustc_hash::{FxHashMap, FxHashSet};

/// Walks every rule, so that making a text can meet no surprise.
pub(super) struct Check<'g> {
    grammar: &'g Grammar,
    reader: &'g Reader,
    /// Which tables a variable's row may come from.
    sources: Vec<FxHashSet<usize>>,
    /// The variables surely filled after a rule, by the rule and those filled before it; `None` while it is walked.
    after: FxHashMap<(usize, u64), Option<u64>>,
    used_rules: FxHashSet<usize>,
    used_tables: FxHashSet<usize>,
}

impl<'g> Check<'g> {
    pub(super) fn new(grammar: &'g Grammar, reader: &'g Reader) -> Self {
        let mut sources = vec![FxHashSet::default(); grammar.variables];
        for rule in &grammar.rules {
            rule.visit(&mut |node| {
                if let Node::Draw { table, variable: Some(variable), .. } = node {
                    sources[*variable].insert(*table);
                }
            });
        }
        Self {
            grammar,
            reader,
            sources,
            after: FxHashMap::default(),
            used_rules: FxHashSet::default(),
            used_tables: FxHashSet::default(),
        }
    }

    pub(super) fn run(mut self) -> Result<()> {
        ensure!(
            self.grammar.variables <= 64,
            "expected at most 64 variables, found {}; hint: use one again",
            self.grammar.variables
        );
        self.rule(self.grammar.root, 0)?;
        for (names, used) in [(&self.reader.rules, &self.used_rules), (&self.reader.tables, &self.used_tables)] {
            if let Some(name) = names.iter().filter(|(_, id)| !used.contains(id)).map(|(name, _)| name).min() {
                bail!(
                    "expected every block to be reached from the root, found `{name}` unused; hint: refer to it or remove it"
                );
            }
        }
        Ok(())
    }

    fn rule(&mut self, rule: usize, filled: u64) -> Result<u64> {
        let name = name_of(&self.reader.rules, rule);
        match self.after.get(&(rule, filled)) {
            Some(Some(after)) => return Ok(*after),
            Some(None) => {
                bail!("expected texts that end, found rule `{name}` inside itself; hint: write the repetition out")
            }
            None => {}
        }
        self.after.insert((rule, filled), None);
        self.used_rules.insert(rule);
        let after = self.choice(&self.grammar.rules[rule], filled).with_context(|| format!("rule `{name}`"))?;
        self.after.insert((rule, filled), Some(after));
        Ok(after)
    }

    fn choice(&mut self, choice: &'g Choice, filled: u64) -> Result<u64> {
        let mut all = u64::MAX;
        for alternative in &choice.alternatives {
            let mut after = filled;
            for node in alternative {
                after = self.node(node, after)?;
            }
            all &= after;
        }
        Ok(all)
    }

    fn node(&mut self, node: &'g Node, filled: u64) -> Result<u64> {
        match node {
            Node::Literal(_) => Ok(filled),
            Node::Choice(choice) => self.choice(choice, filled),
            Node::Rule(rule) => self.rule(*rule, filled),
            Node::Draw { table, variable, except, form } => {
                self.used_tables.insert(*table);
                self.has(*table, *form)?;
                if let Some(except) = except {
                    self.is_filled(*except, filled)?;
                }
                Ok(filled | variable.map_or(0, |variable| 1 << variable))
            }
            Node::Use { variable, form } => {
                self.is_filled(*variable, filled)?;
                for table in self.sources[*variable].clone() {
                    self.has(table, *form)?;
                }
                Ok(filled)
            }
            Node::Dispatch { variable, attribute, rules } => {
                self.is_filled(*variable, filled)?;
                let form = Form { attribute: *attribute, capital: false };
                let mut all = u64::MAX;
                for table in self.sources[*variable].clone() {
                    self.has(table, form)?;
                    for row in &self.grammar.tables[table].rows {
                        let value = row.value(*attribute);
                        let rule = rules.get(value).with_context(|| {
                            format!("expected a rule for `{value}`, found none; hint: name it like its sisters, ending in `/{value}`")
                        })?;
                        all &= self.rule(*rule, filled)?;
                    }
                }
                Ok(all)
            }
        }
    }

    fn is_filled(&self, variable: usize, filled: u64) -> Result<()> {
        ensure!(
            filled >> variable & 1 == 1,
            "expected a table or a variable that holds a row by now, found `{}`; hint: fill it on every way to here, as in `{{hero := person}}`",
            name_of(&self.reader.variables, variable)
        );
        Ok(())
    }

    fn has(&self, table: usize, form: Form) -> Result<()> {
        for row in &self.grammar.tables[table].rows {
            ensure!(
                row.get(form).is_some(),
                "expected attribute `{}` in table `{}`, found none at `{}`; hint: add it to the section's line",
                name_of(&self.reader.attributes, form.attribute),
                name_of(&self.reader.tables, table),
                row.value(NAME)
            );
        }
        Ok(())
    }
}

impl Choice {
    fn visit<'g>(&'g self, look: &mut impl FnMut(&'g Node)) {
        for node in self.alternatives.iter().flatten() {
            look(node);
            if let Node::Choice(choice) = node {
                choice.visit(look);
            }
        }
    }
}

fn name_of(names: &FxHashMap<String, usize>, id: usize) -> &str {
    names.iter().find_map(|(name, &other)| (other == id).then_some(name.as_str())).unwrap_or("?")
}
