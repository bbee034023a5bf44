// head_composition: look-up patterns times transformations, after the synthetic tasks of Xiao et
// al. 2024 (DCMHA, arXiv 2405.08553, section 4.3 and appendix F).
//
//   anna has pear . ben has crow . clara has oak . ben has a kind of  -> bird
//
// A row states three facts and asks a question of one word. Two things have to be done at once: the
// right fact is found by a pattern (the same person's, another person's, the one that differs), and
// its word is transformed (object -> kind, city -> country). A task is a pair of a pattern and a
// transformation. A sequence is `rows` rows of one task: the first `shots` are examples, and the
// answers of the others are the targets.
//
// Person patterns, with two ways to state a fact ("ben has crow", "crow belongs to ben"):
//   same_person   three persons; the answer is of the asked person's thing
//   other_person  two things of the asked person, one of another; the answer is of the other's
//   who           three persons; the answer is the person whose thing is asked for
//   who_not       two persons' things are as asked; the answer is the third person
// Set patterns:
//   not_in_set    x, x and y in some order; "which is not x"; the answer is of y
//   different     the same; "which is different"
//
// All words, phrases and facts are this project's own. Words are tokens. A row is held out by a
// hash of its words, so that neither a sequence nor a row of the held-out data is trained on; the
// knowledge (that a crow is a bird) is the same in both.
#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

using Words = std::vector<std::string>;

Words split_words(std::string_view text) {
  Words words;
  size_t at = 0;
  while ((at = text.find_first_not_of(" \t\n", at)) != std::string_view::npos) {
    const size_t end = std::min(text.find_first_of(" \t\n", at), text.size());
    words.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

constexpr const char* kPersons =
    "anna ben clara david emma felix grace henry iris jack kate leo maya noah olga paul quinn rosa "
    "sam tina umar vera will xenia yusuf zoe adam bella carl diana erik flora gina hugo ida jonas "
    "karla liam mona nils";

// A line is a group: its first word is what the others have in common.
constexpr const char* kKinds[] = {
    "fruit apple pear plum cherry fig grape melon lemon",
    "animal dog cat horse cow goat wolf bear rabbit",
    "bird crow owl eagle sparrow swan gull robin heron",
    "fish trout salmon carp pike tuna eel cod herring",
    "tree oak birch pine elm maple willow beech cedar",
    "metal iron copper gold silver tin brass zinc nickel",
    "garment coat hat scarf glove sock boot skirt vest",
    "furniture table chair sofa bed desk shelf bench stool",
    "vehicle car bus train truck tram ship bicycle ferry",
    "instrument violin flute drum harp piano trumpet cello organ",
};
constexpr const char* kUses[] = {
    "cut knife saw scissors axe",
    "write pen pencil crayon quill",
    "cook pan oven stove pot",
    "shine lamp candle torch lantern",
    "dig spade shovel hoe pickaxe",
    "wipe broom mop sponge brush",
    "join nail screw glue rope",
    "carry bag basket crate sack",
    "see telescope microscope lens mirror",
    "sew needle thread thimble bobbin",
};
// The first city is the capital.
constexpr const char* kCountries[] = {
    "france paris lyon lille",         "italy rome milan naples",
    "spain madrid seville valencia",   "germany berlin munich hamburg",
    "japan tokyo osaka kyoto",         "china beijing shanghai shenzhen",
    "austria vienna graz linz",        "egypt cairo luxor aswan",
    "brazil brasilia salvador recife", "canada ottawa toronto montreal",
    "poland warsaw krakow gdansk",     "norway oslo bergen trondheim",
    "turkey ankara istanbul izmir",    "kenya nairobi mombasa kisumu",
    "peru lima cusco arequipa",        "greece athens patras larissa",
};
constexpr const char* kOpposites[] = {
    "hot cold",    "big small",   "old young",  "rich poor",    "fast slow",
    "strong weak", "tall short",  "happy sad",  "loud quiet",   "tidy messy",
    "brave timid", "early late",  "thick thin", "full empty",   "hard soft",
    "dry wet",     "bright dark", "sweet sour", "smooth rough", "wide narrow",
};
// Each returns to its start.
constexpr const char* kCycles[] = {
    "monday tuesday wednesday thursday friday saturday sunday",
    "january february march april may june july august september october november december",
    "spring summer autumn winter",
    "one two three four five six seven eight nine ten eleven twelve",
};

// A thing, what the transformation makes of it, and its group: the things of a row are of one.
struct Entry {
  std::string thing, result;
  int64_t group = 0;
};

struct Transformation {
  const char* name;
  std::vector<Entry> (*entries)();
  // Of a fact about person P and thing X, both ways round.
  const char *fact, *reversed;
  // Before the answer, or before what is asked for.
  const char *does, *does_not, *link;
};

enum class Order { group_to_thing, thing_to_group, thing_to_itself };

template <size_t kLines>
std::vector<Entry> grouped(const char* const (&lines)[kLines], Order order, size_t most = 99) {
  std::vector<Entry> entries;
  for (const char* line : lines) {
    const Words words = split_words(line);
    for (size_t i = 1; i < words.size() && i <= most; ++i) {
      if (order == Order::group_to_thing) entries.push_back({words[0], words[i]});
      if (order == Order::thing_to_group) entries.push_back({words[i], words[0]});
      if (order == Order::thing_to_itself) entries.push_back({words[i], words[i]});
    }
  }
  return entries;
}

std::vector<Entry> neighbours(bool next) {
  std::vector<Entry> entries;
  int64_t group = 0;
  for (const char* cycle : kCycles) {
    const Words words = split_words(cycle);
    for (size_t i = 0; i < words.size(); ++i) {
      const size_t other = (i + (next ? 1 : words.size() - 1)) % words.size();
      entries.push_back({words[i], words[other], group});
    }
    ++group;
  }
  return entries;
}

std::vector<Entry> opposites() {
  std::vector<Entry> entries;
  for (const char* pair : kOpposites) {
    const Words words = split_words(pair);
    entries.push_back({words[0], words[1]});
    entries.push_back({words[1], words[0]});
  }
  return entries;
}

const std::vector<Transformation>& transformations() {
  static const std::vector<Transformation> all = {
      {"object", [] { return grouped(kKinds, Order::thing_to_itself); }, "P has X",
       "X belongs to P", "has", "does not have", ""},
      {"object_kind", [] { return grouped(kKinds, Order::thing_to_group); }, "P has X",
       "X belongs to P", "has", "does not have", "a kind of"},
      {"tool", [] { return grouped(kUses, Order::thing_to_itself); }, "P owns X", "X is owned by P",
       "owns", "does not own", ""},
      {"tool_use", [] { return grouped(kUses, Order::thing_to_group); }, "P owns X",
       "X is owned by P", "owns", "does not own", "a thing to"},
      {"city", [] { return grouped(kCountries, Order::thing_to_itself); }, "P likes X",
       "X pleases P", "visits", "does not visit", ""},
      {"city_country", [] { return grouped(kCountries, Order::thing_to_group); }, "P likes X",
       "X pleases P", "visits", "does not visit", "a city in"},
      {"country_capital", [] { return grouped(kCountries, Order::group_to_thing, 1); }, "P likes X",
       "X pleases P", "visits", "does not visit", "the capital"},
      {"opposite", opposites, "P is X", "X describes P", "is", "is not", "the opposite of"},
      {"time_before", [] { return neighbours(true); }, "P picked X", "X was picked by P", "picked",
       "did not pick", "what comes just before"},
      {"time_after", [] { return neighbours(false); }, "P picked X", "X was picked by P", "picked",
       "did not pick", "what comes just after"},
  };
  return all;
}

enum class Look { same_person, other_person, who, who_not, not_in_set, different };

struct Pattern {
  const char* name;
  Look look;
  bool reversed;
};

constexpr Pattern kPatterns[] = {
    {"same_person", Look::same_person, false},
    {"same_person_reversed", Look::same_person, true},
    {"other_person", Look::other_person, false},
    {"other_person_reversed", Look::other_person, true},
    {"who", Look::who, false},
    {"who_reversed", Look::who, true},
    {"who_not", Look::who_not, false},
    {"who_not_reversed", Look::who_not, true},
    {"not_in_set", Look::not_in_set, false},
    {"different", Look::different, false},
};

bool of_persons(const Pattern& pattern) {
  return pattern.look != Look::not_in_set && pattern.look != Look::different;
}

Choices pattern_names() {
  Choices names;
  for (const Pattern& pattern : kPatterns) names.emplace_back(pattern.name);
  return names;
}

Choices transformation_names() {
  Choices names;
  for (const Transformation& transformation : transformations()) {
    names.emplace_back(transformation.name);
  }
  return names;
}

// All words that a task may use, the same whatever the options are: the first is padding.
const Words& vocabulary_words() {
  static const Words words = [] {
    Words all = split_words("<pad> | . ? P X who which is not different there are");
    const auto add = [&](std::string_view text) {
      for (const std::string& word : split_words(text)) {
        if (std::find(all.begin(), all.end(), word) == all.end()) all.push_back(word);
      }
    };
    add(kPersons);
    for (const Transformation& t : transformations()) {
      for (const char* phrase : {t.fact, t.reversed, t.does, t.does_not, t.link}) add(phrase);
      for (const Entry& entry : t.entries()) {
        add(entry.thing);
        add(entry.result);
      }
    }
    // The two places of a phrase are no words.
    std::erase_if(all, [](const std::string& word) { return word == "P" || word == "X"; });
    return all;
  }();
  return words;
}

const std::unordered_map<std::string, int64_t>& vocabulary_tokens() {
  static const auto tokens = [] {
    std::unordered_map<std::string, int64_t> map;
    for (const std::string& word : vocabulary_words()) {
      map.emplace(word, static_cast<int64_t>(map.size()));
    }
    return map;
  }();
  return tokens;
}

int64_t token_of(const std::string& word) { return vocabulary_tokens().at(word); }

// Phrases as tokens, the places of a person and a thing below 0.
constexpr int64_t kPersonPlace = -1, kThingPlace = -2;
std::vector<int64_t> tokens_of_phrase(std::string_view phrase) {
  std::vector<int64_t> tokens;
  for (const std::string& word : split_words(phrase)) {
    tokens.push_back(word == "P" ? kPersonPlace : word == "X" ? kThingPlace : token_of(word));
  }
  return tokens;
}

// A transformation in tokens.
struct Theme {
  struct Fact {
    int64_t thing, result;
  };
  std::vector<std::vector<Fact>> groups;  // of at least three results each
  std::vector<int64_t> fact, reversed, does, does_not, link;
};

Theme theme_of(const Transformation& t) {
  Theme theme{.groups = {},
              .fact = tokens_of_phrase(t.fact),
              .reversed = tokens_of_phrase(t.reversed),
              .does = tokens_of_phrase(t.does),
              .does_not = tokens_of_phrase(t.does_not),
              .link = tokens_of_phrase(t.link)};
  for (const Entry& entry : t.entries()) {
    theme.groups.resize(std::max(theme.groups.size(), static_cast<size_t>(entry.group + 1)));
    theme.groups[static_cast<size_t>(entry.group)].push_back(
        {token_of(entry.thing), token_of(entry.result)});
  }
  return theme;
}

constexpr int64_t kFacts = 3;             // of a row
constexpr uint64_t kHeldOutRowShare = 4;  // one row in this many is held out

struct HeadCompositionOptions {
  Words patterns = pattern_names();
  Words transformations = transformation_names();
  int64_t rows = 8;
  int64_t shots = 2;
};

class HeadComposition final : public GeneratedTask {
 public:
  HeadComposition(const HeadCompositionOptions& options, uint64_t seed, int64_t eval_sequences)
      : HeadComposition(options, chosen_patterns(options), chosen_themes(options), seed,
                        eval_sequences) {}

  Accuracy accuracy() const override { return Accuracy::token; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    // What a guess knows that does not look anything up: the transformed words of the facts, or
    // their persons. A set has only two different words.
    double shown = 0;
    for (const Pattern& pattern : patterns_) shown += of_persons(pattern) ? 1.0 / 3.0 : 1.0 / 2.0;
    return {{"any token", 1.0 / static_cast<double>(vocabulary())},
            {"one of the answers that the facts of the row allow",
             shown / static_cast<double>(patterns_.size())}};
  }
  std::string describe() const override {
    const int64_t patterns = std::ssize(patterns_), themes = std::ssize(themes_);
    return str("Sequences of ", options_.rows, " rows of three facts and a question, the first ",
               options_.shots, " of them as examples, of ", counted(patterns * themes, "task"),
               ": ", counted(patterns, "pattern"), " of look-up times ",
               counted(themes, "transformation"), "; a vocabulary of ", vocabulary(),
               " words; generated, ", eval_sequences(), " held out.");
  }

  std::vector<int64_t> encode(std::string_view text) const override {
    std::vector<int64_t> tokens;
    for (const std::string& word : split_words(text)) {
      const auto found = vocabulary_tokens().find(word);
      if (found == vocabulary_tokens().end()) {
        usage_error("'", word, "' is not a word of this task",
                    did_you_mean(word, vocabulary_words(), "."));
      }
      tokens.push_back(found->second);
    }
    return tokens;
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::string text;
    for (int64_t token : tokens) text += vocabulary_words().at(static_cast<size_t>(token)) + " ";
    return text;
  }

 protected:
  Sample draw(Random& random) const override { return draw_rows(random, false); }
  Sample draw_held_out(Random& random) const override { return draw_rows(random, true); }

 private:
  using Tokens = std::vector<int64_t>;

  HeadComposition(const HeadCompositionOptions& options, std::vector<Pattern> patterns,
                  std::vector<Theme> themes, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, static_cast<int64_t>(vocabulary_words().size()),
                      options.rows * longest_row(patterns, themes) - 2, eval_sequences),
        options_(options),
        patterns_(std::move(patterns)),
        themes_(std::move(themes)) {
    for (const std::string& person : split_words(kPersons)) persons_.push_back(token_of(person));
  }

  static std::vector<Pattern> chosen_patterns(const HeadCompositionOptions& options) {
    std::vector<Pattern> chosen;
    for (const Pattern& pattern : kPatterns) {
      if (std::count(options.patterns.begin(), options.patterns.end(), pattern.name) > 0) {
        chosen.push_back(pattern);
      }
    }
    return chosen;
  }
  static std::vector<Theme> chosen_themes(const HeadCompositionOptions& options) {
    std::vector<Theme> chosen;
    for (const Transformation& transformation : transformations()) {
      if (std::count(options.transformations.begin(), options.transformations.end(),
                     transformation.name) > 0) {
        chosen.push_back(theme_of(transformation));
      }
    }
    return chosen;
  }

  // Tokens of the longest row that the tasks can make, its answer and mark included. A row of one
  // pattern and theme always has the same length.
  static int64_t longest_row(const std::vector<Pattern>& patterns,
                             const std::vector<Theme>& themes) {
    size_t longest = 0;
    for (const Pattern& pattern : patterns) {
      for (const Theme& theme : themes) {
        const Tokens three(static_cast<size_t>(kFacts), 0);
        longest = std::max(longest, row(pattern, theme, three, three, 0, 0, 0).size());
      }
    }
    return static_cast<int64_t>(longest);
  }

  // The words of a row. `asked`: the person or the result that the question names.
  static Tokens row(const Pattern& pattern, const Theme& theme, const Tokens& persons,
                    const Tokens& things, int64_t asked_person, int64_t asked, int64_t answer) {
    Tokens out;
    const auto add = [&](const Tokens& tokens) {
      out.insert(out.end(), tokens.begin(), tokens.end());
    };
    static const Tokens kStop = tokens_of_phrase("."), kThere = tokens_of_phrase("there are"),
                        kWho = tokens_of_phrase("who"), kQuestion = tokens_of_phrase("?"),
                        kNot = tokens_of_phrase("which is not"),
                        kDifferent = tokens_of_phrase("which is different ?"),
                        kEnd = tokens_of_phrase("|");
    if (of_persons(pattern)) {
      for (size_t i = 0; i < persons.size(); ++i) {
        for (int64_t token : pattern.reversed ? theme.reversed : theme.fact) {
          out.push_back(token == kPersonPlace  ? persons[i]
                        : token == kThingPlace ? things[i]
                                               : token);
        }
        add(kStop);
      }
    } else {
      add(kThere);
      add(things);
      add(kStop);
    }
    switch (pattern.look) {
      case Look::same_person:
      case Look::other_person:
        out.push_back(asked_person);
        add(pattern.look == Look::same_person ? theme.does : theme.does_not);
        add(theme.link);
        break;
      case Look::who:
      case Look::who_not:
        add(kWho);
        add(pattern.look == Look::who ? theme.does : theme.does_not);
        add(theme.link);
        out.push_back(asked);
        add(kQuestion);
        break;
      case Look::not_in_set:
        add(kNot);
        out.push_back(asked);
        add(kQuestion);
        add(theme.link);
        break;
      case Look::different:
        add(kDifferent);
        add(theme.link);
        break;
    }
    out.push_back(answer);
    add(kEnd);
    return out;
  }

  // Facts of one group with different results, as many as asked for (two or three).
  static std::vector<Theme::Fact> draw_facts(Random& random, const Theme& theme, size_t count) {
    const auto& group =
        theme.groups[static_cast<size_t>(random.below(static_cast<int64_t>(theme.groups.size())))];
    std::vector<Theme::Fact> facts;
    while (facts.size() < count) {
      const Theme::Fact fact =
          group[static_cast<size_t>(random.below(static_cast<int64_t>(group.size())))];
      if (std::none_of(facts.begin(), facts.end(),
                       [&](const Theme::Fact& f) { return f.result == fact.result; })) {
        facts.push_back(fact);
      }
    }
    return facts;
  }

  // Another thing with the same result where there is one, else the same.
  static int64_t thing_like(Random& random, const Theme& theme, const Theme::Fact& fact) {
    std::vector<int64_t> like;
    for (const auto& group : theme.groups) {
      for (const Theme::Fact& other : group) {
        if (other.result == fact.result && other.thing != fact.thing) like.push_back(other.thing);
      }
    }
    if (like.empty()) return fact.thing;
    return like[static_cast<size_t>(random.below(static_cast<int64_t>(like.size())))];
  }

  Tokens draw_row(Random& random, const Pattern& pattern, const Theme& theme) const {
    Tokens persons, things(static_cast<size_t>(kFacts));
    for (int64_t i : random.distinct(static_cast<int64_t>(persons_.size()), kFacts)) {
      persons.push_back(persons_[static_cast<size_t>(i)]);
    }
    // The place of the fact that is looked for, and those of the two others.
    const std::vector<int64_t> places = random.distinct(kFacts, kFacts);
    const auto at = static_cast<size_t>(places[0]), second = static_cast<size_t>(places[1]),
               third = static_cast<size_t>(places[2]);
    switch (pattern.look) {
      case Look::same_person:
      case Look::other_person:
      case Look::who: {
        const std::vector<Theme::Fact> facts = draw_facts(random, theme, 3);
        things[at] = facts[0].thing;
        things[second] = facts[1].thing;
        things[third] = facts[2].thing;
        if (pattern.look == Look::who) {
          return row(pattern, theme, persons, things, 0, facts[0].result, persons[at]);
        }
        if (pattern.look == Look::other_person) persons[third] = persons[second];
        const size_t asked = pattern.look == Look::same_person ? at : second;
        return row(pattern, theme, persons, things, persons[asked], 0, facts[0].result);
      }
      case Look::who_not: {
        const std::vector<Theme::Fact> facts = draw_facts(random, theme, 2);
        things[at] = facts[0].thing;
        things[second] = facts[1].thing;
        things[third] = thing_like(random, theme, facts[1]);
        return row(pattern, theme, persons, things, 0, facts[1].result, persons[at]);
      }
      case Look::not_in_set:
      case Look::different: {
        const std::vector<Theme::Fact> facts = draw_facts(random, theme, 2);
        things[at] = facts[0].thing;
        things[second] = things[third] = facts[1].thing;
        return row(pattern, theme, {}, things, 0, facts[1].thing, facts[0].result);
      }
    }
    fail("head_composition has no such pattern.");
  }

  static bool is_held_out_row(const Tokens& row) {
    StableHash hash;
    for (int64_t token : row) hash.add(static_cast<uint64_t>(token));
    return hash.value() % kHeldOutRowShare == 0;
  }

  Sample draw_rows(Random& random, bool held_out) const {
    const Pattern& pattern =
        patterns_[static_cast<size_t>(random.below(static_cast<int64_t>(patterns_.size())))];
    const Theme& theme =
        themes_[static_cast<size_t>(random.below(static_cast<int64_t>(themes_.size())))];
    Sample sample;
    for (int64_t i = 0; i < options_.rows; ++i) {
      Tokens words = draw_row(random, pattern, theme);
      while (is_held_out_row(words) != held_out) words = draw_row(random, pattern, theme);
      sample.inputs.insert(sample.inputs.end(), words.begin(), words.end());
      sample.targets.resize(sample.inputs.size(), kIgnore);
      // The answer is the last but one, and is predicted from the token before it.
      if (i >= options_.shots) sample.targets.end()[-3] = words.end()[-2];
    }
    // The last answer is a target only.
    sample.inputs.resize(sample.inputs.size() - 2);
    sample.targets.resize(sample.inputs.size());
    return sample;
  }

  HeadCompositionOptions options_;
  std::vector<Pattern> patterns_;
  std::vector<Theme> themes_;
  Tokens persons_;
};

struct HeadCompositionSpec final : GeneratedSpec {
  HeadCompositionOptions options;

  std::string type() const override { return "head_composition"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("patterns", options.patterns, "how the fact is found; every sequence is of one",
            pattern_names());
    f.field("transformations", options.transformations,
            "what is done to its word; a task is a pattern and a transformation",
            transformation_names());
    f.field("rows", options.rows, "rows of three facts and a question in a sequence", size_from(1));
    f.field("shots", options.shots, "first rows that are examples only, fewer than rows",
            size_from(0));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.patterns.empty() || options.transformations.empty()) {
      usage_error("head_composition has an empty list of ",
                  options.patterns.empty() ? "patterns" : "transformations",
                  ", expected at least one name.");
    }
    if (options.shots >= options.rows) {
      usage_error("head_composition has shots = ", options.shots,
                  ", expected fewer than rows = ", options.rows, ".");
    }
    return std::make_shared<HeadComposition>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> head_composition_spec() {
  return std::make_shared<HeadCompositionSpec>();
}

}  // namespace headloom::data
