package mysqllockvet

import (
	"fmt"
	"go/constant"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/tools/go/ssa"
)

// The limits of package lockctx.
const (
	maxKey   = 255
	maxSlots = 1000
)

// strategies are the options that say how a key is kept.
var strategies = map[string]string{
	"Row": "Row", "Lease": "Lease", "Advisory": "Advisory", "Optimistic": "Optimistic", "IfVersion": "Optimistic",
}

// checkOptions reports calls whose options and keys the first statement refuses.
func (c *checker) checkOptions() {
	for _, call := range c.calls() {
		f := c.callee(call.Common())
		if !f.is(pkgLockctx, "", "With", "WithKeys") && !f.is(pkgLock, "", "Do", "DoKeys", "Acquire", "AcquireKeys") {
			continue
		}
		if bad := c.badHint(f); bad != "" {
			c.report(call.Pos(), "options", "%s: %s", f.name, bad)
		}
	}
}

// badHint says what is wrong with a call's key and options, as far as they are
// constants; "" if it is nothing. It is what internal/hint checks when the program runs.
func (c *checker) badHint(f function) string {
	opts, _ := c.options(f)
	for _, check := range []func(function, []function) string{c.badKey, c.badStrategy, c.badKind, c.badNumber, c.badRetry} {
		if bad := check(f, opts); bad != "" {
			return bad
		}
	}
	return ""
}

func (c *checker) badKey(f function, _ []function) string {
	at := map[string]int{"With": 1, "Do": 2, "Acquire": 2}[f.name]
	if at == 0 {
		return ""
	}
	switch key, ok := c.text1(f.args[at]); {
	case ok && key == "":
		return "the key is empty, which the first statement refuses; name what is locked"
	case len(key) > maxKey:
		return fmt.Sprintf("the key has %d bytes, more than %d, which the first statement refuses; shorten it", len(key), maxKey)
	}
	return ""
}

func (c *checker) badStrategy(_ function, opts []function) string {
	first := ""
	for _, o := range opts {
		switch s := strategies[o.name]; {
		case s == "":
		case first == "":
			first = s
		case s != first:
			return fmt.Sprintf("%s and %s exclude each other, which the first statement refuses;"+
				" a key is kept in one way, so give one of them", first, s)
		}
	}
	return ""
}

// badKind says which option needs another strategy.
func (c *checker) badKind(_ function, opts []function) string {
	strategy := ""
	for _, o := range opts {
		if s := strategies[o.name]; s != "" {
			strategy = s
		}
	}
	has := func(name string) bool { return named(opts, name) }
	if has("Shared") && has("Slots") {
		return "Shared and Slots exclude each other, which the first statement refuses; give one of them"
	}
	needed := map[string][]string{"MinHold": {"Lease"}, "MaxHold": {"Lease"}, "Shared": {"Row"}, "Slots": {"Row", "Lease"}}
	for _, o := range opts {
		option, needs := o.name, needed[o.name]
		if needs != nil && strategy != "" && !slices.Contains(needs, strategy) {
			return fmt.Sprintf("%s needs %s, and the options say %s, which the first statement refuses;"+
				" drop one of them", option, strings.Join(needs, " or "), strategy)
		}
	}
	return ""
}

// badNumber says which constant is out of its range.
func (c *checker) badNumber(_ function, opts []function) string {
	for _, o := range opts {
		if len(o.args) != 1 {
			continue
		}
		n, ok := c.number(o.args[0])
		if !ok {
			continue
		}
		want := ""
		switch {
		case o.name == "Lease" && n < int64(time.Second), o.name == "MaxHold" && n != 0 && n < int64(time.Second):
			want = "at least 1s"
		case o.name == "MinHold" && n < 0, o.name == "Wait" && n < 0, o.name == "Retry" && n < 0:
			want = "no less than 0"
		case o.name == "Slots" && (n < 1 || n > maxSlots):
			want = fmt.Sprintf("1 to %d", maxSlots)
		case o.name == "IfVersion" && n == 0:
			want = "a version that was read: no key has the version 0"
		default:
			continue
		}
		shown := fmt.Sprint(n)
		if o.name != "Slots" && o.name != "Retry" && o.name != "IfVersion" {
			shown = time.Duration(n).String()
		}
		return fmt.Sprintf("%s(%s) is refused by the first statement; give it %s", o.name, shown, want)
	}
	return ""
}

// badRetry says where nothing can be run again.
func (c *checker) badRetry(f function, opts []function) string {
	i := slices.IndexFunc(opts, func(o function) bool { return o.name == "Retry" })
	if i < 0 {
		return ""
	}
	if n, ok := c.number(opts[i].args[0]); !ok || n <= 0 {
		return ""
	}
	switch {
	case f.name != "Do" && f.name != "DoKeys":
		return f.name + " cannot run anything again, so Retry is refused by the first statement; use mysqllock.Do, or drop it"
	case named(opts, "Lease"), named(opts, "Advisory"):
		return "parts of the function are committed under a lease or an advisory lock, so Retry is refused; drop it"
	}
	return ""
}

// text1 returns a constant text.
func (c *checker) text1(v ssa.Value) (string, bool) {
	k, ok := c.source(v).(*ssa.Const)
	if !ok || k.Value == nil || k.Value.Kind() != constant.String {
		return "", false
	}
	return constant.StringVal(k.Value), true
}

// number returns a constant number.
func (c *checker) number(v ssa.Value) (int64, bool) {
	k, ok := c.source(v).(*ssa.Const)
	if !ok || k.Value == nil || k.Value.Kind() != constant.Int {
		return 0, false
	}
	return constant.Int64Val(k.Value)
}

// checkKeys reports keys that are kept as advisory locks in one place and otherwise in
// another: these do not exclude each other.
func (c *checker) checkKeys() {
	first := make(map[string]*lock)
	for _, l := range c.inOrder {
		key := c.key(l)
		if c.inTest(l.pos) {
			continue // tests have their keys for themselves
		}
		if opts, _ := c.options(l.f); key != "" && slices.ContainsFunc(opts, func(o function) bool {
			return o.name != "Advisory" && strategies[o.name] != "" || o.name == "Shared" || o.name == "Slots"
		}) {
			first[key] = l
		}
	}
	for _, l := range c.inOrder {
		opts, _ := c.options(l.f)
		if other := first[c.key(l)]; other != nil && named(opts, "Advisory") {
			at := c.pass.Fset.Position(other.pos)
			c.report(l.pos, "advisory", "the advisory lock on this key does not exclude the other lock on the same key at %s:%d; "+
				"keep a key in one way everywhere", filepath.Base(at.Filename), at.Line)
		}
	}
}

// key returns the constant key of a lock, or the constant format that makes it.
func (c *checker) key(l *lock) string {
	at := 1
	if l.isHeld() {
		at = 2
	}
	if strings.HasSuffix(l.f.name, "Keys") {
		return ""
	}
	if key, ok := c.text1(l.f.args[at]); ok {
		return key
	}
	if call, ok := c.source(l.f.args[at]).(*ssa.Call); ok {
		if f := c.callee(call.Common()); f.is("fmt", "", "Sprintf") {
			format, _ := c.text1(f.args[0])
			return format
		}
	}
	return ""
}
