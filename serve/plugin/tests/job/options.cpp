// --name VALUE pairs and nothing else: a job is described where it is started.
#include "tests/job/options.h"

#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>

namespace {

using Setter = std::function<void(Options*, const std::string&)>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

double number(const std::string& text) {
  std::size_t end = 0;
  double value = 0;
  try {
    value = std::stod(text, &end);
  } catch (const std::logic_error&) {
    end = 0;
  }
  if (text.empty() || end != text.size()) refuse("'" + text + "' is not a number");
  return value;
}

int whole(const std::string& text) { return static_cast<int>(number(text)); }

std::uint64_t count(const std::string& text) { return static_cast<std::uint64_t>(number(text)); }

std::vector<std::string> split(const std::string& text, char at, std::size_t most) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (parts.size() + 1 < most) {
    const std::size_t end = text.find(at, begin);
    if (end == std::string::npos) break;
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

/// CALL:rank=R|all[:comm=SLOT]:KIND[=ARGUMENTS]
Action action_from(const std::string& text, bool repeats) {
  static const std::map<std::string, std::pair<Action::Kind, std::size_t>> kinds = {
      {"simulate", {Action::Kind::simulate, 1}}, {"capture", {Action::Kind::capture, 2}},
      {"p2p", {Action::Kind::p2p, 0}},           {"bcasts", {Action::Kind::bcasts, 1}},
      {"sleep", {Action::Kind::sleep, 1}},       {"stop", {Action::Kind::stop, 1}},
      {"kill", {Action::Kind::kill, 0}},         {"fork", {Action::Kind::fork, 0}},
      {"abort", {Action::Kind::abort, 1}},       {"sh", {Action::Kind::shell, 1}},
      {"swap", {Action::Kind::swap, 2}},         {"symmetric", {Action::Kind::symmetric, 1}},
  };
  Action action = {};
  action.repeats = repeats;
  std::string rest = text;
  const auto next = [&rest] {
    std::vector<std::string> parts = split(rest, ':', 2);
    rest = parts.size() > 1 ? parts[1] : "";
    return parts[0];
  };
  action.call = count(next());
  if (repeats && action.call == 0) refuse("'" + text + "' would happen all the time");
  if (rest.rfind("rank=", 0) == 0) {
    const std::string rank = next().substr(5);
    action.rank = rank == "all" ? -1 : whole(rank);
  }
  if (rest.rfind("comm=", 0) == 0) action.slot = whole(next().substr(5));
  const std::vector<std::string> parts = split(rest, '=', 2);
  const auto found = kinds.find(parts[0]);
  if (found == kinds.end()) refuse("no action '" + parts[0] + "' in '" + text + "'");
  action.kind = found->second.first;
  const std::size_t wanted = found->second.second;
  if (parts.size() > 1 && wanted > 0) action.arguments = split(parts[1], ',', wanted);
  if (action.arguments.size() != wanted) refuse("wrong number of arguments in '" + text + "'");
  return action;
}

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> all = {
      {"release", [](Options* o, const std::string& v) { o->release = v; }},
      {"ranks", [](Options* o, const std::string& v) { o->num_ranks = whole(v); }},
      {"nodes", [](Options* o, const std::string& v) { o->num_nodes = whole(v); }},
      {"comms", [](Options* o, const std::string& v) { o->num_slots = whole(v); }},
      {"threads", [](Options* o, const std::string& v) { o->num_threads = whole(v); }},
      {"calls", [](Options* o, const std::string& v) { o->num_calls = count(v); }},
      {"lifetime", [](Options* o, const std::string& v) { o->calls_per_lifetime = count(v); }},
      {"rate", [](Options* o, const std::string& v) { o->calls_per_s = number(v); }},
      {"run-ahead", [](Options* o, const std::string& v) { o->run_ahead = whole(v); }},
      {"max-group", [](Options* o, const std::string& v) { o->max_group = whole(v); }},
      {"pattern", [](Options* o, const std::string& v) { o->pattern = whole(v); }},
      {"jitter-us", [](Options* o, const std::string& v) { o->jitter_us = whole(v); }},
      {"seed", [](Options* o, const std::string& v) { o->seed = count(v); }},
      {"deadline", [](Options* o, const std::string& v) { o->deadline_s = number(v); }},
      {"watchdog", [](Options* o, const std::string& v) { o->watchdog_s = number(v); }},
      {"survivors-go-on", [](Options* o, const std::string& v) { o->survivors_go_on = v != "0"; }},
      {"shrinks", [](Options* o, const std::string& v) { o->shrinks = v != "0"; }},
      {"opposite", [](Options* o, const std::string& v) { o->is_opposite = v != "0"; }},
      {"one-thread", [](Options* o, const std::string& v) { o->is_on_one_thread = v != "0"; }},
      {"create-at-once", [](Options* o, const std::string& v) { o->creates_at_once = v != "0"; }},
      {"abort-creation", [](Options* o, const std::string& v) { o->aborts_creation = whole(v); }},
      {"netns",
       [](Options* o, const std::string& v) {
         const std::vector<std::string> parts = split(v, ':', 2);
         if (parts.size() != 2) refuse("--netns needs RANK:PATH");
         o->namespaces[whole(parts[0])] = parts[1];
       }},
      {"destroy", [](Options* o, const std::string& v) { o->destroys = v != "0"; }},
      {"kernel-delay-us", [](Options* o, const std::string& v) { o->kernel_delay_us = whole(v); }},
      {"kernel-drop", [](Options* o, const std::string& v) { o->kernel_drop_percent = whole(v); }},
      {"kernel-duplicate",
       [](Options* o, const std::string& v) { o->kernel_duplicate_percent = whole(v); }},
      {"scatter", [](Options* o, const std::string& v) { o->scatter_percent = number(v); }},
      {"slow",
       [](Options* o, const std::string& v) {
         const std::vector<std::string> parts = split(v, ':', 3);
         if (parts.size() != 3) refuse("--slow needs ALGORITHM:PROTOCOL:FACTOR, in numbers");
         o->slow_cell = 3 * whole(parts[0]) + whole(parts[1]);
         o->slow_factor = number(parts[2]);
       }},
      {"env",
       [](Options* o, const std::string& v) {
         const std::size_t colon = v.find(':'), equals = v.find('=');
         const bool has_rank = colon != std::string::npos &&
                               v.find_first_not_of("0123456789") == colon && colon < equals;
         o->environment.emplace_back(has_rank ? whole(v.substr(0, colon)) : -1,
                                     has_rank ? v.substr(colon + 1) : v);
       }},
      {"at", [](Options* o, const std::string& v) { o->actions.push_back(action_from(v, false)); }},
      {"every",
       [](Options* o, const std::string& v) { o->actions.push_back(action_from(v, true)); }},
  };
  return all;
}

void check(const Options& options) {
  if (options.plugin.empty()) refuse("no plugin is named");
  if (options.num_ranks < 2 || options.num_ranks > 16) refuse("--ranks must be 2 to 16");
  if (options.num_nodes < 1 || options.num_ranks % options.num_nodes != 0) {
    refuse("--nodes must divide --ranks");
  }
  const bool positive = options.num_slots > 0 && options.num_threads > 0 && options.run_ahead > 0 &&
                        options.max_group > 0 && options.pattern > 0;
  if (!positive) refuse("--comms, --threads, --run-ahead, --max-group and --pattern are from 1");
  for (const Action& action : options.actions) {
    if (action.slot >= options.num_slots)
      refuse("an action is at a communicator that is not there");
    if (action.kind == Action::Kind::bcasts && action.rank >= 0) {
      refuse("broadcasts are for all ranks");
    }
    if (action.rank >= options.num_ranks) refuse("an action is on a rank that is not there");
  }
}

}  // namespace

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.rfind("--", 0) != 0) {
      if (!options.plugin.empty()) refuse("'" + argument + "' is not an option");
      // A bare name is looked for on LD_LIBRARY_PATH, and ranks may have different ones.
      const bool is_path = argument.find('/') != std::string::npos;
      options.plugin = is_path ? std::filesystem::absolute(argument).string() : argument;
      continue;
    }
    const auto setter = setters().find(argument.substr(2));
    if (setter == setters().end()) refuse("no option " + argument);
    if (i + 1 == arguments.size()) refuse(argument + " needs a value");
    setter->second(&options, arguments[++i]);
  }
  check(options);
  return options;
}
