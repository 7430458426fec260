package sqltext

import "strings"

// Writes returns the first table that query names as one whose rows it writes, and of which
// asks says yes: the target of INSERT, REPLACE and LOAD, and each table that UPDATE and DELETE
// name outside of subqueries, also one that they only join. "" is none. asks gets the
// schema as the text has it, "" without one, and the table, both without their quotes.
//
// sure is false if the text cannot be read with certainty, where it may write any table. If
// servers may read it differently, the tables of all readings count.
//
// DDL, TRUNCATE included, counts for nothing, nor does what the text does not show: bodies of
// procedures, functions and triggers, tables beneath a view, and statements that EXECUTE runs.
func Writes(query string, asks func(schema, table string) bool) (table string, sure bool) {
	one := strings.IndexByte(query, ';') < 0
	a := analyzer{scanner: newScanner(query, reading{}), asked: asks}
	a.targets(one)
	if !a.doubt && !a.hopeless {
		return a.target, true
	}
	conds, ok := conditionsIn(query)
	if !ok {
		return "", false
	}
	for r := range readingsOf(query, conds) {
		a := analyzer{scanner: newScanner(query, r), asked: asks, target: a.target}
		a.targets(one)
		if a.hopeless || a.target != "" {
			return a.target, a.target != ""
		}
	}
	return "", true
}

// targets asks for what the text writes. If it is one statement, its beginning is enough.
func (a *analyzer) targets(one bool) {
	if one {
		a.begin()
	} else {
		a.scan()
	}
}

// tableName goes on past the name of a table that is written, and asks for it.
func (a *analyzer) tableName() {
	schema, table := "", ""
	if a.current() == "." { // MariaDB takes .t for t
		a.next()
	}
	for a.tok == word || a.tok == name {
		schema, table = table, a.value()
		a.alias, a.qualified = true, false // a parenthesis behind it is no call
		if a.next(); a.current() != "." {
			break
		}
		a.next()
	}
	if a.asked == nil || a.target != "" || table == "" || !a.asked(schema, table) {
		return
	}
	if a.target = table; schema != "" {
		a.target = schema + "." + table
	}
}

// inner goes through a statement that begins with no verb of its own, and asks for the tables of
// those in it: MariaDB runs IF … THEN, loops and blocks outside of procedures, too.
func (a *analyzer) inner() {
	for ; a.asked != nil && !a.atEnd(); a.next() {
		if a.at("INSERT", "REPLACE", "UPDATE", "DELETE", "LOAD") && !isOneOf(a.before(), "FOR", "KEY") { // FOR UPDATE, ON DUPLICATE KEY UPDATE
			a.form(strings.ToUpper(a.current()))
		}
	}
}

// changed goes through the tables of an UPDATE or DELETE: names in front of commas and JOINs,
// also in parentheses, up to SET or WHERE. Aliases in front of FROM are taken for tables.
func (a *analyzer) changed() {
	list, joined, expects := a.depth, false, true // list is the depth of the current list of tables
	a.next()
	a.skip("LOW_PRIORITY", "QUICK", "IGNORE")
	for !a.atEnd() {
		switch {
		case a.tok == '(' && expects: // (a JOIN b), or a subquery
			list++
		case a.depth < list:
			list, expects = a.depth, false
		case a.depth > list, !expects && a.before() == ".": // a column may have any name: a.order
		case a.at("SELECT", "WITH", "TABLE", "VALUES"):
			list, expects = list-1, false
		case a.at("SET", "WHERE", "LIMIT", "RETURNING"), a.at("ORDER") && !is(a.before(), "FOR"):
			return
		case a.at("FROM"), a.at("USING") && !joined, a.tok == ',':
			expects = true
		case a.at("JOIN", "STRAIGHT_JOIN"):
			joined, expects = true, true
		case a.at("LATERAL"), a.tok == '{', a.before() == "{": // {OJ a LEFT JOIN b …}
		case expects && (a.tok == word || a.tok == name):
			a.tableName()
			expects = false
			continue
		}
		a.next()
	}
}
