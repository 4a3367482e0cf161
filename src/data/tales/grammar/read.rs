//! Reading a grammar from its notation.

use super::{Choice, Form, NAME, Node, Row, Table, WITH_ARTICLE, Weights};
use anyhow::{Context, Result, bail, ensure};
use rustc_hash::{FxHashMap, FxHashSet};

/// A `rule` or `table` with its indented lines.
pub(super) struct Block<'s> {
    pub(super) line: usize,
    pub(super) kind: &'s str,
    pub(super) name: &'s str,
    pub(super) body: Vec<&'s str>,
}

/// The names met so far, and the readers of what stands in a block.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) rules: FxHashMap<String, usize>,
    pub(super) tables: FxHashMap<String, usize>,
    pub(super) variables: FxHashMap<String, usize>,
    pub(super) attributes: FxHashMap<String, usize>,
}

impl Reader {
    pub(super) fn declare<'s>(&mut self, source: &'s str) -> Result<Vec<Block<'s>>> {
        self.attributes.insert("name".to_owned(), NAME);
        self.attributes.insert("an".to_owned(), WITH_ARTICLE);
        let mut blocks: Vec<Block> = Vec::new();
        for (index, line) in source.lines().enumerate() {
            let number = index + 1;
            let text = line.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            if line.starts_with(' ') {
                let block = blocks.last_mut().with_context(|| {
                    format!("line {number}: expected a `rule` or `table` first, found `{text}`; hint: only their lines are indented")
                })?;
                block.body.push(text);
                continue;
            }
            let (kind, name) = text
                .split_once(' ')
                .filter(|(kind, _)| matches!(*kind, "rule" | "table"))
                .with_context(|| {
                    format!("line {number}: expected `rule NAME` or `table NAME`, found `{text}`; hint: indent what belongs to a block")
                })?;
            let names = if kind == "rule" { &mut self.rules } else { &mut self.tables };
            let next = names.len();
            ensure!(
                names.insert(name.to_owned(), next).is_none(),
                "line {number}: expected a new name, found a second {kind} `{name}`; hint: rename one of them"
            );
            blocks.push(Block { line: number, kind, name, body: Vec::new() });
        }
        Ok(blocks)
    }

    pub(super) fn table(&mut self, body: &[&str]) -> Result<Table> {
        let mut rows = Vec::new();
        let mut weights = Vec::new();
        let mut seen = FxHashSet::default();
        let (mut factor, mut rank) = (1, 0);
        let mut shared = Vec::new();
        for line in body {
            if let Some(section) = line.strip_prefix(':') {
                let (weight, section) = weighted(section)?;
                factor = weight;
                rank = 0;
                shared = self.attribute_values(section)?;
                continue;
            }
            for name in items(line) {
                ensure!(
                    seen.insert(name),
                    "expected different rows, found `{name}` twice; hint: a text with it would have two derivations"
                );
                let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
                let mut forms = vec![Some(both_cases(name)), Some(both_cases(&format!("{article} {name}")))];
                for (attribute, value) in &shared {
                    if forms.len() <= *attribute {
                        forms.resize(attribute + 1, None);
                    }
                    forms[*attribute] = Some(both_cases(value));
                }
                rows.push(Row(forms));
                weights.push(zipf(factor, rank));
                rank += 1;
            }
        }
        ensure!(rows.len() > 1, "expected two or more rows, found {}; hint: write a single one as text", rows.len());
        Ok(Table { weights: Weights::new(&weights), rows })
    }

    fn attribute_values<'s>(&mut self, section: &'s str) -> Result<Vec<(usize, &'s str)>> {
        items(section)
            .map(|pair| {
                let (attribute, value) = pair.split_once('=').with_context(|| {
                    format!("expected `attribute=value`, found `{pair}`; hint: commas separate them")
                })?;
                Ok((number(&mut self.attributes, attribute), value))
            })
            .collect()
    }

    pub(super) fn rule(&mut self, body: &[&str]) -> Result<Choice> {
        let mut alternatives: Vec<String> = Vec::new();
        for line in body {
            match (line.strip_prefix("- "), alternatives.last_mut()) {
                (Some(text), _) => alternatives.push(text.to_owned()),
                (None, Some(text)) => {
                    text.push(' ');
                    text.push_str(line);
                }
                (None, None) => bail!(
                    "expected `- ` before the first alternative, found `{line}`; hint: each alternative starts with it"
                ),
            }
        }
        ensure!(
            !alternatives.is_empty(),
            "expected an alternative, found none; hint: add a line that starts with `- `"
        );
        let mut weights = Vec::new();
        let mut sequences = Vec::new();
        for alternative in &alternatives {
            let (weight, text) = weighted(alternative)?;
            let paragraphs: Vec<&str> = text.split('¶').map(str::trim).collect();
            let text = paragraphs.join("\n\n");
            let mut rest = text.as_str();
            sequences.push(self.sequence(&mut rest)?);
            ensure!(
                rest.is_empty(),
                "expected `(` before `{rest}`; hint: parentheses hold alternatives and stand in pairs"
            );
            weights.push(weight);
        }
        Ok(Choice { weights: Weights::new(&weights), alternatives: sequences })
    }

    /// Reads up to the end, or up to the `|` or `)` that ends an alternative.
    fn sequence(&mut self, rest: &mut &str) -> Result<Vec<Node>> {
        let mut nodes = Vec::new();
        while let Some(first) = rest.chars().next() {
            match first {
                '|' | ')' => break,
                '(' => nodes.push(Node::Choice(self.inline_choice(rest)?)),
                '[' => nodes.push(self.reference(enclosed(rest, ']')?)?),
                '{' => nodes.push(self.saying(enclosed(rest, '}')?)?),
                _ => {
                    let end = rest.find(['|', ')', '(', '[', '{']).unwrap_or(rest.len());
                    let (literal, after) = rest.split_at(end);
                    ensure!(
                        !literal.contains([']', '}']),
                        "expected an opening bracket before `{literal}`; hint: `]` and `}}` close a name"
                    );
                    nodes.push(Node::Literal(literal.to_owned()));
                    *rest = after;
                }
            }
        }
        Ok(nodes)
    }

    fn inline_choice(&mut self, rest: &mut &str) -> Result<Choice> {
        let mut weights = Vec::new();
        let mut alternatives = Vec::new();
        loop {
            // Past the `(` or `|`.
            let (weight, text) = weighted_as_is(&rest[1..])?;
            *rest = text;
            weights.push(weight);
            alternatives.push(self.sequence(rest)?);
            match rest.chars().next() {
                Some('|') => {}
                Some(_) => {
                    *rest = &rest[1..];
                    break;
                }
                None => bail!("expected `)`, found the end; hint: parentheses stand in pairs"),
            }
        }
        Ok(Choice { weights: Weights::new(&weights), alternatives })
    }

    /// `rule`, or `rule/variable.attribute`.
    fn reference(&mut self, inside: &str) -> Result<Node> {
        let Some((base, (variable, attribute))) =
            inside.split_once('/').and_then(|(base, choice)| Some((base, choice.split_once('.')?)))
        else {
            return Ok(Node::Rule(self.rule_named(inside)?));
        };
        let rules: FxHashMap<_, _> = self
            .rules
            .iter()
            .filter_map(|(name, &rule)| {
                let value = name.strip_prefix(base)?.strip_prefix('/')?;
                Some((value.to_owned(), rule))
            })
            .collect();
        ensure!(
            !rules.is_empty(),
            "expected rules `{base}/…`, found none; hint: write one for each value of `{attribute}`"
        );
        Ok(Node::Dispatch {
            variable: number(&mut self.variables, variable),
            attribute: number(&mut self.attributes, attribute),
            rules,
        })
    }

    /// `variable.form`, `table.form`, `variable := table.form`, the last also with ` but not variable`.
    fn saying(&mut self, inside: &str) -> Result<Node> {
        let (inside, capital) = match inside.strip_prefix('^') {
            Some(inside) => (inside, true),
            None => (inside, false),
        };
        let (variable, source) = match inside.split_once(" := ") {
            Some((variable, source)) => (Some(variable), source),
            None => (None, inside),
        };
        let (source, except) = match source.split_once(" but not ") {
            Some((source, except)) => (source, Some(except)),
            None => (source, None),
        };
        let (name, attribute) = source.split_once('.').unwrap_or((source, "name"));
        let form = Form { attribute: number(&mut self.attributes, attribute), capital };
        if let Some(variable) = variable {
            ensure!(
                !self.tables.contains_key(variable),
                "expected a variable, found table `{variable}` before `:=`; hint: give the variable a name of its own"
            );
        }
        if let Some(&table) = self.tables.get(name) {
            Ok(Node::Draw {
                table,
                variable: variable.map(|name| number(&mut self.variables, name)),
                except: except.map(|name| number(&mut self.variables, name)),
                form,
            })
        } else {
            ensure!(
                variable.is_none() && except.is_none(),
                "expected a table, found `{name}`; hint: tables start with `table NAME`"
            );
            Ok(Node::Use { variable: number(&mut self.variables, name), form })
        }
    }

    pub(super) fn rule_named(&self, name: &str) -> Result<usize> {
        self.rules
            .get(name)
            .copied()
            .with_context(|| format!("expected a rule, found `{name}`; hint: rules start with `rule NAME`"))
    }
}

/// The number of a name, a new one where the name is new.
fn number(names: &mut FxHashMap<String, usize>, name: &str) -> usize {
    let next = names.len();
    *names.entry(name.to_owned()).or_insert(next)
}

fn items(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(str::trim).filter(|item| !item.is_empty())
}

/// Takes a leading `3* ` off; without one the weight is 1.
fn weighted(text: &str) -> Result<(u64, &str)> {
    let (weight, text) = weighted_as_is(text.trim())?;
    Ok((weight, text.trim()))
}

/// As [`weighted`], but spaces after the star belong to the text.
fn weighted_as_is(text: &str) -> Result<(u64, &str)> {
    let after = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = &text[..text.len() - after.len()];
    match after.strip_prefix('*') {
        Some(after) if !digits.is_empty() => {
            let weight = digits.parse()?;
            ensure!(
                (1..=1000).contains(&weight),
                "expected a weight from 1 to 1000, found {digits}; hint: leave out what has no weight"
            );
            Ok((weight, after))
        }
        _ => Ok((1, text)),
    }
}

/// The weight of a row by its place in its section: Zipf's law, with the head of the curve flattened.
fn zipf(factor: u64, rank: u64) -> u64 {
    factor * (100_000 / (rank + 8))
}

/// Takes a bracketed name off the front of `rest`.
fn enclosed<'s>(rest: &mut &'s str, close: char) -> Result<&'s str> {
    let (inside, after) = rest[1..]
        .split_once(close)
        .with_context(|| format!("expected `{close}` after `{rest}`; hint: brackets stand in pairs"))?;
    *rest = after;
    Ok(inside)
}

fn both_cases(text: &str) -> [String; 2] {
    let mut capital = text.to_owned();
    if let Some(first) = capital.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    [text.to_owned(), capital]
}
