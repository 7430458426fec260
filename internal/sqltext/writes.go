package sqltext

import "strings"

// Writes returns the first table that query names as one whose rows it writes, and for which asks says yes: the target of
// INSERT, REPLACE and LOAD, and each table that UPDATE and DELETE name outside of subqueries, also one that they only join. ""
// is none. asks gets the schema as the text has it, "" without one, and the table, both without their quotes.
//
// sure is false if the text cannot be read with certainty, where it may write any table. If servers may read it differently,
// the tables of all readings count.
//
// DDL, TRUNCATE included, counts for nothing, nor does what the text does not show: bodies of procedures, functions and
// triggers, tables beneath a view, and statements that EXECUTE runs.
func Writes(query string, asks func(schema, table string) bool) (table string, sure bool) {
	a := analyzer{lexer: lexer{text: query}, asked: asks}
	for a.target == "" && a.another() {
		if strings.IndexByte(query, ';') >= 0 {
			a.scan()
		} else {
			a.begin() // this is enough
		}
	}
	return a.target, a.target != "" || !a.hopeless
}

// ask asks for the table that the statement names.
func (a *analyzer) ask() {
	if a.asked == nil || a.target != "" || a.object == "" || !a.asked(a.schema, a.object) {
		return
	}
	if a.target = a.object; a.schema != "" {
		a.target = a.schema + "." + a.object
	}
}

// inner asks for the tables of statements in one that begins with no verb of its own: MariaDB runs IF … THEN, loops and blocks
// outside of procedures, too.
func (a *analyzer) inner() {
	for ; a.asked != nil && !a.atEnd(); a.next() {
		if a.at("INSERT", "REPLACE", "UPDATE", "DELETE", "LOAD") && !isOneOf(a.before(), "FOR", "KEY") { // FOR UPDATE, ON DUPLICATE KEY UPDATE
			a.verb = a.current()
			a.goOn(a.match())
		}
	}
}

// changed goes through the tables of an UPDATE or DELETE: names in front of commas and JOINs, also in parentheses, up to SET
// or WHERE. Aliases in front of FROM are taken for tables.
func (a *analyzer) changed() {
	list, joined, expects := a.depth, false, true // list is the depth of the current list of tables
	if a.tok == '(' {
		list--
	}
	for a.skip(); a.at("QUICK") && is(a.verb, "DELETE"); {
		a.next()
		a.skip()
	}
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
		case a.tok == ',', a.at("FROM", "JOIN", "STRAIGHT_JOIN"), a.at("USING") && !joined:
			joined, expects = joined || a.at("JOIN", "STRAIGHT_JOIN"), true
		case a.at("LATERAL"), a.before() == "{": // {OJ a LEFT JOIN b …}
		case expects && (a.tok == word || a.tok == name):
			a.objectName()
			a.ask()
			expects = false
			continue
		}
		a.next()
	}
}
