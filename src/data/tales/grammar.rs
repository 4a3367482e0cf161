//! A probabilistic grammar as data: read from text, checked as a whole, expanded into a text with its exact probability.

use anyhow::{Context, Result, bail, ensure};
use chacha20::ChaCha8Rng;
use rand::Rng;
use rustc_hash::{FxHashMap, FxHashSet};

/// The forms that every row of a table has without naming them: itself, and itself after "a" or "an".
const NAME: usize = 0;
const WITH_ARTICLE: usize = 1;

/// A grammar in which no rule reaches itself, so that every derivation ends.
///
/// The notation is described at the head of `tales.grammar`.
#[derive(Debug)]
pub struct Grammar {
    pub(super) rules: Vec<Choice>,
    pub(super) tables: Vec<Table>,
    pub(super) root: usize,
    variables: usize,
}

/// One thing that a text is made of.
#[derive(Debug)]
pub(super) enum Node {
    Literal(String),
    Choice(Choice),
    Rule(usize),
    /// Draws a row of a table, not the one held by `except`, keeps it in `variable`, and says it in a form.
    Draw {
        table: usize,
        variable: Option<usize>,
        except: Option<usize>,
        form: Form,
    },
    /// Says the row that a variable holds.
    Use {
        variable: usize,
        form: Form,
    },
    /// Goes on with the rule that an attribute of a variable's row names.
    Dispatch {
        variable: usize,
        attribute: usize,
        rules: FxHashMap<String, usize>,
    },
}

/// Alternatives, each a sequence of nodes, and how likely they are.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) weights: Weights,
    pub(super) alternatives: Vec<Vec<Node>>,
}

/// Integer weights: a choice is then exact and the same on every machine.
#[derive(Debug)]
pub(super) struct Weights {
    /// `ends[i]` is the sum of the weights up to and including `i`.
    ends: Vec<u64>,
    /// −ln of each probability.
    pub(super) nats: Vec<f64>,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) weights: Weights,
    pub(super) rows: Vec<Row>,
}

/// What can be said of one row, by attribute; each as written and with a capital letter.
#[derive(Debug)]
pub(super) struct Row(Vec<Option<[String; 2]>>);

/// Which attribute of a row is said, and whether with a capital letter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    attribute: usize,
    capital: bool,
}

/// A row, by the numbers of its table and of itself.
pub(super) type RowId = (usize, usize);

/// A text that a grammar made, and its information content.
#[derive(Debug, Clone, PartialEq)]
pub struct Story {
    /// The text.
    pub text: String,
    /// −ln of the probability of the choices that made it.
    pub nats: f64,
}

impl Weights {
    fn new(weights: &[u64]) -> Self {
        let total = weights.iter().sum::<u64>() as f64;
        let ends = weights
            .iter()
            .scan(0, |end, weight| {
                *end += weight;
                Some(*end)
            })
            .collect();
        let nats = weights.iter().map(|&weight| (total / weight as f64).ln()).collect();
        Self { ends, nats }
    }

    fn start(&self, index: usize) -> u64 {
        if index == 0 { 0 } else { self.ends[index - 1] }
    }

    fn weight(&self, index: usize) -> u64 {
        self.ends[index] - self.start(index)
    }

    fn total(&self) -> u64 {
        self.ends[self.ends.len() - 1]
    }

    /// What leaving out one alternative takes off the information content of each other one.
    pub(super) fn nats_without(&self, left_out: usize) -> f64 {
        let total = self.total() as f64;
        (total / (total - self.weight(left_out) as f64)).ln()
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> usize {
        let at = below(self.total(), rng);
        self.ends.partition_point(|&end| end <= at)
    }

    fn draw_without(&self, left_out: usize, rng: &mut ChaCha8Rng) -> usize {
        let mut at = below(self.total() - self.weight(left_out), rng);
        if at >= self.start(left_out) {
            at += self.weight(left_out);
        }
        self.ends.partition_point(|&end| end <= at)
    }
}

/// A number below `total`, written out because the crates' own methods may give other values in another version.
/// Totals are below 2^32, so no number is more than 2^-32 more likely, relatively, than another.
fn below(total: u64, rng: &mut ChaCha8Rng) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(total)) >> 64) as u64
}

impl Row {
    fn get(&self, form: Form) -> Option<&str> {
        let spoken = self.0.get(form.attribute)?.as_ref()?;
        Some(&spoken[usize::from(form.capital)])
    }

    /// The text of a form that the grammar's checks found to be there.
    pub(super) fn say(&self, form: Form) -> &str {
        self.get(form).expect("a checked grammar uses only the attributes that its rows have")
    }

    /// The value of an attribute that the grammar's checks found to be there.
    pub(super) fn value(&self, attribute: usize) -> &str {
        self.say(Form { attribute, capital: false })
    }
}

impl Grammar {
    /// Reads and checks a grammar; `root` is the rule that makes a whole text.
    ///
    /// # Errors
    /// Where the notation is broken, a name is unknown or unused, a variable may be used before it holds a row, an
    /// attribute may be missing, or a rule reaches itself.
    pub fn parse(source: &str, root: &str) -> Result<Self> {
        let mut reader = Reader::default();
        let blocks = reader.declare(source)?;
        let mut rules = Vec::new();
        let mut tables = Vec::new();
        for block in &blocks {
            let place = || format!("line {}, {} `{}`", block.line, block.kind, block.name);
            if block.kind == "rule" {
                rules.push(reader.rule(&block.body).with_context(place)?);
            } else {
                tables.push(reader.table(&block.body).with_context(place)?);
            }
        }
        let root = reader.rule_named(root)?;
        let grammar = Self { rules, tables, root, variables: reader.variables.len() };
        Check::new(&grammar, &reader).run()?;
        Ok(grammar)
    }

    /// Makes one text.
    pub fn generate(&self, rng: ChaCha8Rng) -> Story {
        let mut writer = Writer {
            grammar: self,
            rng,
            held: vec![None; self.variables],
            story: Story { text: String::new(), nats: 0.0 },
        };
        writer.choose(&self.rules[self.root]);
        writer.story
    }

    pub(super) fn row(&self, (table, row): RowId) -> &Row {
        &self.tables[table].rows[row]
    }
}

struct Writer<'g> {
    grammar: &'g Grammar,
    rng: ChaCha8Rng,
    held: Vec<Option<RowId>>,
    story: Story,
}

impl<'g> Writer<'g> {
    fn choose(&mut self, choice: &'g Choice) {
        let index = choice.weights.draw(&mut self.rng);
        self.story.nats += choice.weights.nats[index];
        for node in &choice.alternatives[index] {
            self.write(node);
        }
    }

    fn write(&mut self, node: &'g Node) {
        let grammar = self.grammar;
        match node {
            Node::Literal(literal) => self.story.text.push_str(literal),
            Node::Choice(choice) => self.choose(choice),
            Node::Rule(rule) => self.choose(&grammar.rules[*rule]),
            Node::Draw { table, variable, except, form } => {
                let weights = &grammar.tables[*table].weights;
                // Two variables may hold rows of different tables: then there is nothing to leave out.
                let left_out = except.map(|other| self.held(other)).filter(|(other, _)| other == table);
                let row = if let Some((_, left_out)) = left_out {
                    self.story.nats -= weights.nats_without(left_out);
                    weights.draw_without(left_out, &mut self.rng)
                } else {
                    weights.draw(&mut self.rng)
                };
                self.story.nats += weights.nats[row];
                if let Some(variable) = variable {
                    self.held[*variable] = Some((*table, row));
                }
                self.story.text.push_str(grammar.row((*table, row)).say(*form));
            }
            Node::Use { variable, form } => {
                let row = grammar.row(self.held(*variable));
                self.story.text.push_str(row.say(*form));
            }
            Node::Dispatch { variable, attribute, rules } => {
                let value = grammar.row(self.held(*variable)).value(*attribute);
                self.choose(&grammar.rules[rules[value]]);
            }
        }
    }

    fn held(&self, variable: usize) -> RowId {
        self.held[variable].expect("a checked grammar fills a variable before it uses it")
    }
}

/// A `rule` or `table` with its indented lines.
struct Block<'s> {
    line: usize,
    kind: &'s str,
    name: &'s str,
    body: Vec<&'s str>,
}

/// The names met so far, and the readers of what stands in a block.
#[derive(Default)]
struct Reader {
    rules: FxHashMap<String, usize>,
    tables: FxHashMap<String, usize>,
    variables: FxHashMap<String, usize>,
    attributes: FxHashMap<String, usize>,
}

impl Reader {
    fn declare<'s>(&mut self, source: &'s str) -> Result<Vec<Block<'s>>> {
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

    fn table(&mut self, body: &[&str]) -> Result<Table> {
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

    fn rule(&mut self, body: &[&str]) -> Result<Choice> {
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

    fn rule_named(&self, name: &str) -> Result<usize> {
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

/// Walks every rule, so that making a text can meet no surprise.
struct Check<'g> {
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
    fn new(grammar: &'g Grammar, reader: &'g Reader) -> Self {
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

    fn run(mut self) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn texts_come_as_often_as_their_probability_says() {
        let grammar = Grammar::parse(
            "table colour\n  red, green, blue, grey\nrule text\n  - 3* {one := colour} {colour but not one}\n  - {colour.an}",
            "text",
        )
        .expect("a toy grammar is right");
        let mut counts: FxHashMap<String, (u32, f64)> = FxHashMap::default();
        let draws = 100_000;
        for seed in 0..draws {
            let story = grammar.generate(ChaCha8Rng::seed_from_u64(seed));
            let (count, nats) = counts.entry(story.text).or_insert((0, story.nats));
            *count += 1;
            assert_eq!(*nats, story.nats);
        }
        assert_eq!(counts.len(), 12 + 4);
        for (text, (count, nats)) in counts {
            let expected = (-nats).exp() * draws as f64;
            let deviations = (f64::from(count) - expected) / expected.sqrt();
            assert!(deviations.abs() < 4.5, "`{text}` {count} times instead of {expected}");
        }
    }

    #[test]
    fn capitals_articles_and_attributes_agree() {
        let grammar = Grammar::parse(
            "table animal\n  : cry=Hoo\n  owl\n  : cry=Moo\n  cow\nrule text\n  - {^who := animal.an} [says/who.cry] ¶ {who}\nrule says/Hoo\n  - hoots.\nrule says/Moo\n  - moos.",
            "text",
        )
        .expect("a toy grammar is right");
        for seed in 0..20 {
            let text = grammar.generate(ChaCha8Rng::seed_from_u64(seed)).text;
            assert!(["An owl hoots.\n\nowl", "A cow moos.\n\ncow"].contains(&text.as_str()), "{text}");
        }
    }

    #[test]
    fn a_wrong_grammar_is_refused_with_the_place_and_a_hint() {
        let table = "table colour\n  red, blue\n";
        for (source, place) in [
            ("rule text\n  - [tail]".to_owned(), "`tail`"),
            ("rule text\n  - a [text]".to_owned(), "inside itself"),
            (format!("{table}rule text\n  - a"), "`colour` unused"),
            (format!("{table}rule text\n  - {{hue}} {{hue := colour}}"), "`hue`"),
            (format!("{table}rule text\n  - (|{{hue := colour}}) {{hue}}"), "`hue`"),
            (format!("{table}rule text\n  - {{colour.size}}"), "`size`"),
            (format!("{table}rule text\n  - {{hue := colour}} [b/hue.name]\nrule b/red\n  - a"), "`blue`"),
            (format!("{table}rule text\n  - {{colour := colour}}"), "name of its own"),
            ("table colour\n  red, red\nrule text\n  - a".to_owned(), "twice"),
            ("table colour\n  red\nrule text\n  - a".to_owned(), "line 1"),
            ("rule text\n  - (a|b".to_owned(), "`)`"),
            ("rule text\n  - a)".to_owned(), "`(`"),
            ("rule text\n  - 0* a".to_owned(), "weight"),
            ("rule text\n  a".to_owned(), "`- `"),
            ("rules text\n  - a".to_owned(), "line 1"),
            ("rule text\n  - a\nrule text\n  - b".to_owned(), "line 3"),
            ("rule other\n  - a".to_owned(), "`text`"),
        ] {
            let message = match Grammar::parse(&source, "text") {
                Ok(_) => panic!("accepted: {source}"),
                Err(error) => format!("{error:#}"),
            };
            assert!(
                message.contains(place) && message.contains("; hint: ") && !message.contains('\n'),
                "{source}\n{message}"
            );
        }
    }
}
